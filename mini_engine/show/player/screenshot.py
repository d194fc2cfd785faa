"""Takes the picture of the player that the README shows. For developers: needs playwright and a browser.

python -m mini_engine.show.player.screenshot docs/images/player.png
"""

import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from mini_engine.show.player import ready_setup, write_player

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find_browser() -> str | None:
    """The path of an installed Chromium or Chrome; the environment variable BROWSER_PATH goes first."""
    return os.environ.get("BROWSER_PATH") or next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def open_browser(path: str):
    """A headless browser with a fresh profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def screenshot(out: Path) -> None:
    """The ready set-up in the step that preempts r3, which the page follows."""
    path = find_browser()
    if path is None:
        sys.exit("no Chromium or Chrome found; install one, or name it in BROWSER_PATH")
    out.parent.mkdir(parents=True, exist_ok=True)
    trace = ready_setup()
    step = next(r["step"] for r in trace.steps for e in r["events"] if e["type"] == "PREEMPTED")
    with tempfile.TemporaryDirectory() as folder, open_browser(path) as browser:
        page = browser.new_page(
            viewport={"width": 1280, "height": 800}, device_scale_factor=2, color_scheme="light"
        )
        html = write_player(Path(folder) / "player.html", trace, names=("20 blocks, six requests",))
        page.goto(f"{html.as_uri()}#step={step}&follow=r3")
        page.screenshot(path=out, full_page=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m mini_engine.show.player.screenshot OUT.png")
    screenshot(Path(sys.argv[1]))
