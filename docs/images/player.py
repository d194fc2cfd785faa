"""Takes docs/images/player.png and animation.gif, the player as the README shows it.

python docs/images/player.py [FOLDER]      needs playwright, and Chromium or Chrome
"""

import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from mini_engine.bench.start import find_browser, open_browser
from mini_engine.show.player import ready_setup, write_player
from mini_engine.trace import Preempted, Scheduled

FOLLOWED, LAST = "r3", 17  # it is preempted, comes back, and finishes in that step
SHORT, LONG = 1000, 3500  # milliseconds of a step, and of one that admits or preempts it


def draw(out: Path = Path(__file__).parent) -> None:
    """The step that preempts r3, and the run so far, a frame a step."""
    if (path := find_browser()) is None:
        sys.exit("no Chromium or Chrome found; install one, or name it in BROWSER_PATH")
    trace, shots, durations = ready_setup(), [], []
    with tempfile.TemporaryDirectory() as folder, open_browser(path) as browser:

        def page(name: str, width: int, height: int, scale: float, **options: Any) -> tuple[Any, str]:
            view = {"viewport": {"width": width, "height": height}, "device_scale_factor": scale}
            html = write_player(Path(folder, name), trace, names=("20 blocks, six requests",), **options)
            return browser.new_page(**view, color_scheme="light"), html.as_uri()

        still, address = page("still.html", 1280, 800, 2)
        moving, veiled = page("moving.html", 1120, 1000, 1.5, veil=True)
        for record in trace.steps[: LAST + 1]:
            events = [e for e in record.events if e.id == FOLLOWED]
            turns = [type(e) for e in events if isinstance(e, Preempted | Scheduled)]
            place = f"#step={record.step}&follow={FOLLOWED}"
            if Preempted in turns:
                still.goto(address + place)
                shot = Image.open(BytesIO(still.screenshot(full_page=True))).convert("RGB")
                few = shot.quantize(256, dither=Image.Dither.NONE)  # less than half of the bytes
                few.save(out / "player.png", optimize=True)
            moving.goto(veiled + place)
            moving.locator("#readout", has_text=f"Step {record.step} of").wait_for()
            pane, log = moving.locator(".pane").bounding_box(), moving.locator(".log-card").bounding_box()
            top = pane["y"] - 10
            clip = {"x": 0, "y": top, "width": 1120, "height": log["y"] + log["height"] + 4 - top}
            shots.append(Image.open(BytesIO(moving.screenshot(clip=clip))).convert("RGB"))
            durations.append(LONG if turns else SHORT)
    # It opens on a full frame, which is all that a reader sees where pictures stand still.
    fullest = max(n for n, duration in enumerate(durations) if duration == LONG)  # it comes back
    save(out / "animation.gif", [shots[fullest], *shots], [SHORT, *durations])


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
