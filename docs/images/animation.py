"""Takes docs/images/animation.gif: the player going through its ready run, as the README shows it.

python docs/images/animation.py [OUT.gif]      needs playwright, and Chromium or Chrome
"""

import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image

from mini_engine.show.player import ready_setup, write_player
from mini_engine.tests.browser import find_browser, open_browser
from mini_engine.trace import Preempted, Scheduled, StepTrace

PICTURE = Path(__file__).with_suffix(".gif")
FOLLOWED, LAST = "r3", 17  # it is preempted, comes back, and finishes in that step
WIDTH, SHORT, LONG = 1120, 1000, 3500  # pixels; milliseconds of a step, and of one that admits or preempts r3


def draw(out: Path = PICTURE) -> None:
    """The run so far, and what the step decides, a frame a step."""
    if (path := find_browser()) is None:
        sys.exit("no Chromium or Chrome found; install one, or name it in BROWSER_PATH")
    trace = ready_setup()
    steps = trace.steps[: LAST + 1]
    with tempfile.TemporaryDirectory() as folder, open_browser(path) as browser:
        page = browser.new_page(
            viewport={"width": WIDTH, "height": 1000}, device_scale_factor=1.5, color_scheme="light"
        )
        html = write_player(
            Path(folder) / "player.html", trace, names=("20 blocks, six requests",), veil=True
        )
        shots = []
        for record in steps:
            page.goto(f"{html.as_uri()}#step={record.step}&follow={FOLLOWED}")
            page.locator("#readout", has_text=f"Step {record.step} of").wait_for()
            top, log = page.locator(".pane").bounding_box(), page.locator(".log-card").bounding_box()
            edge = {"x": 0, "y": top["y"] - 10, "width": WIDTH}
            clip = edge | {"height": log["y"] + log["height"] + 4 - edge["y"]}
            shots.append(Image.open(BytesIO(page.screenshot(clip=clip))).convert("RGB"))
    save(out, shots, [LONG if is_turn(record) else SHORT for record in steps])


def is_turn(record: StepTrace) -> bool:
    """Whether the step admits the followed request, or throws it out."""
    return any(isinstance(e, Preempted | Scheduled) and e.id == FOLLOWED for e in record.events)


def save(out: Path, shots: list[Image.Image], durations: list[int]) -> None:
    """One palette for all frames, so that only what changes from one to the next is stored."""
    height = max(shot.height for shot in shots)
    sheet = Image.new("RGB", (shots[0].width, height * len(shots)))
    for number, shot in enumerate(shots):
        sheet.paste(shot, (0, number * height))
    palette = sheet.quantize(128)
    first, *others = (shot.quantize(palette=palette, dither=Image.Dither.NONE) for shot in shots)
    first.save(out, save_all=True, append_images=others, duration=durations, loop=0, optimize=True)


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))
