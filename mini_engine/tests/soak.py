"""Counts of `make soak` over all of pytest's workers: `count("scheduler steps", 300)` adds to a file.

`python -m mini_engine.tests.soak` deletes the counts, and with --print prints their sums.
"""

import os
import sys
from collections import Counter
from pathlib import Path

SOAK = bool(os.environ.get("SOAK"))
COUNTS = Path("out/soak.counts")


def count(what: str, number: int = 1) -> None:
    """Add to the counts if this is a soak; a line per call, short enough that several writers do not mix."""
    if SOAK:
        COUNTS.parent.mkdir(exist_ok=True)
        with COUNTS.open("a", encoding="utf-8") as file:
            file.write(f"{number} {what}\n")


def main() -> None:
    if "--print" not in sys.argv:
        COUNTS.unlink(missing_ok=True)
        return
    counts: Counter[str] = Counter()
    for line in COUNTS.read_text("utf-8").splitlines():
        number, what = line.split(" ", 1)
        counts[what] += int(number)
    for what, number in sorted(counts.items()):
        print(f"{number:>12,}  {what}")


if __name__ == "__main__":
    main()
