"""Takes docs/images/player.png, the picture of the player that the README shows.

python docs/images/player.py [OUT.png]      needs playwright, and Chromium or Chrome
"""

import sys
import tempfile
from pathlib import Path

from mini_engine.show.player import ready_setup, write_player
from mini_engine.tests.browser import find_browser, open_browser

PICTURE = Path(__file__).with_suffix(".png")


def draw(out: Path = PICTURE) -> None:
    """The ready set-up in the step that preempts r3, which the page follows."""
    path = find_browser()
    if path is None:
        sys.exit("no Chromium or Chrome found; install one, or name it in BROWSER_PATH")
    trace = ready_setup()
    step = next(r.step for r in trace.steps for e in r.events if e.type == "PREEMPTED")
    with tempfile.TemporaryDirectory() as folder, open_browser(path) as browser:
        page = browser.new_page(
            viewport={"width": 1280, "height": 800}, device_scale_factor=2, color_scheme="light"
        )
        html = write_player(Path(folder) / "player.html", trace, names=("20 blocks, six requests",))
        page.goto(f"{html.as_uri()}#step={step}&follow=r3")
        page.screenshot(path=out, full_page=True)


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))
