"""The wait of a person: seconds from a command to its end, and from a page to a Python that is ready."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:  # playwright is needed only where a browser is installed
    from playwright.sync_api import Browser, BrowserContext

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
PATIENCE = 120  # seconds


@dataclass
class Start:
    """A wait, its goal in seconds, and what was measured; `left_out` says why nothing was."""

    name: str
    goal: float
    seconds: list[float] = field(default_factory=list)
    left_out: str = ""


def measure(model: str, rounds: int, report: Callable[[str], object]) -> list[Start]:
    """Measure each wait so many times, after a first time that is not counted."""
    with TemporaryDirectory() as folder:
        engine = [sys.executable, "-m", "mini_engine"]
        first = [*engine, "generate", "-m", model, "-p", "Once upon a time", "--max-tokens", "1", "-t", "0"]
        starts = [
            _commands(f"generate with {model}, its first token", 1.5, first, rounds),
            _commands("demo, from its second start on", 2, [*engine, "demo", "--out", folder], rounds),
            _lab(rounds),
            _page(rounds),
        ]
    for start in starts:
        if start.left_out:
            report(f"left out: {start.name}, because {start.left_out}")
    return starts


def table(starts: list[Start]) -> Table:
    """Return the measured waits as a table."""
    shown = Table("", "median s", "min to max", "goal", header_style="bold")
    for start in starts:
        if seconds := start.seconds:
            spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
            shown.add_row(start.name, f"{median(seconds):.2f}", spread, f"{start.goal:g}")
    return shown


def _commands(name: str, goal: float, command: list[str], rounds: int, ends: tuple[int, ...] = (0,)) -> Start:
    """Time a command to its end. Raises ValueError with its last line if it ends in another way."""
    start = Start(name, goal)
    for counts in [False] + rounds * [True]:
        began = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
        seconds = time.perf_counter() - began
        if done.returncode not in ends:
            said = (done.stderr.strip() or done.stdout.strip() or "nothing was said").splitlines()[-1]
            raise ValueError(f"{name}: the command ended with {done.returncode}: {said}")
        start.seconds += [seconds] * counts
    return start


def _lab(rounds: int) -> Start:
    name, goal = "labs test lab-01", 1.0
    if not (ROOT / "labs" / "lab-01").is_dir():
        return Start(name, goal, left_out="the labs are in a checkout only")
    # With 1 it ends where the learner's file fails a test.
    return _commands(name, goal, [sys.executable, "-m", "labs", "test", "lab-01"], rounds, ends=(0, 1))


def _page(rounds: int) -> Start:
    start = Start("lab-01's page, from its second visit on", 3)
    if not (ROOT / "docs" / "_build" / "site" / "write").is_dir():
        start.left_out = "docs/_build/site has no labs' pages; `make docs` builds them, with npm"
    elif not (path := find_browser()):
        start.left_out = "no Chromium or Chrome was found; install one or set BROWSER_PATH"
    elif not find_spec("playwright"):
        start.left_out = "playwright is not installed; the dev extra has it"
    else:
        with _site() as address, _profile(path) as context:
            _visit(context, address)
            start.seconds = [_visit(context, address) for _ in range(rounds)]
    return start


def _visit(context: BrowserContext, address: str) -> float:
    page, began = context.new_page(), time.perf_counter()
    page.goto(address)
    page.locator("#status", has_text="Python is ready").wait_for(timeout=1e3 * PATIENCE)
    seconds = time.perf_counter() - began
    page.close()
    return seconds


@contextmanager
def _site() -> Iterator[str]:
    """Serve the built site as `python -m labs open` does, without a browser, and yield the page's address."""
    command = [sys.executable, "-u", "-m", "labs", "open", "lab-01", "--port", "8149"]
    quiet = os.environ | {"BROWSER": "true"}
    with subprocess.Popen(command, cwd=ROOT, env=quiet, stdout=subprocess.PIPE, encoding="utf-8") as server:
        try:
            assert server.stdout
            words = server.stdout.readline().split()
            if not words:
                raise ValueError("`python -m labs open lab-01 --port 8149` did not start; run it to see why")
            yield words[0]
        finally:
            server.terminate()


def find_browser() -> str | None:
    """Return the path of an installed Chromium or Chrome; $BROWSER_PATH goes first."""
    return os.environ.get("BROWSER_PATH") or next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def _profile(path: str) -> Iterator[BrowserContext]:
    """A headless browser that keeps its cache on the disk, as a person's does: compiled WebAssembly too."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, TemporaryDirectory() as folder:
        context = playwright.chromium.launch_persistent_context(
            folder, executable_path=path, args=FLAGS.split()
        )
        try:
            yield context
        finally:
            context.close()


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
