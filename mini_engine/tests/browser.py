"""The browser that the player's tests and its picture look through: the system's own, headless."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # playwright is needed only where a browser is installed
    from playwright.sync_api import Browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


def find_browser() -> str | None:
    """The path of an installed Chromium or Chrome; the environment variable BROWSER_PATH goes first."""
    return os.environ.get("BROWSER_PATH") or next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def open_browser(path: str) -> Iterator[Browser]:
    """A headless browser with a fresh profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium. Not for the whole session: others need this thread's event loop."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the dev extra has it)")
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium or Chrome found; install one or set BROWSER_PATH")
    with open_browser(path) as opened:
        yield opened
