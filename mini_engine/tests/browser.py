"""The browser that the player's tests and its picture look through: the system's own, headless."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from mini_engine.bench.start import find_browser, open_browser

if TYPE_CHECKING:  # playwright is needed only where a browser is installed
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium. Not for the whole session: others need this thread's event loop."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the dev extra has it)")
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium or Chrome found; install one or set BROWSER_PATH")
    with open_browser(path) as opened:
        yield opened
