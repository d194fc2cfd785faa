"""Writes the run of a failed test as a page of the player, beside the reference's: out/lab-NN.html.

The page shows a lab's first failure in a pytest run; later ones do not overwrite it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from labs.kit.judge import compare
from labs.kit.judge.guard import deadline
from labs.kit.judge.manifest import Lab
from labs.kit.toys.words import describe

SECONDS = 5.0
_written: set[str] = set()  # labs whose page this process has written
screen: Callable[[dict[str, Any]], None] | None = None  # shows runs in place of a file


def path_of(lab: Lab) -> Path:
    """Return the path of a lab's page."""
    return lab.path.parents[1] / "out" / f"{lab.id}.html"


def write(
    lab: Lab, yours: compare.Runs, reference: compare.Runs, said: str = "", may_write: bool = True
) -> str:
    """Write the page. Return the line that names it, or "" if there is no step to play.

    It opens at the first step in which the two differ, with the sentence `said` on top. Without a reference
    it shows the learner's run alone.
    Whatever the run was like, this raises nothing but KeyboardInterrupt.
    """
    name = f"out/{path_of(lab).name}"
    try:
        with deadline(SECONDS):
            number, parted = compare.first_departing(yours, reference) or (len(yours) - 1, None)
            at = parted and (parted.yours or parted.reference)
            expected = reference[number][1] if number < len(reference) else None
            run, found = yours[number][1], {"step": at.step} if at else {}
            if not run.steps and not (expected and expected.steps):
                return ""
            from mini_engine.show.player import payload, write_player

            options: dict[str, Any] = {"names": ("yours", "reference"), "said": said, **found}
            if screen:
                screen(payload(run, expected, **options))
                lead = "the player shows"
            elif lab.id in _written or not may_write:
                return f"{name} shows the first failure of these tests; run this one alone to see it there"
            else:
                write_player(path_of(lab), run, expected, **options)
                _written.add(lab.id)
                lead = f"{name} in a browser:"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # TimeUp, too
        return f"no page for the player: {describe(error)}"
    whose = "yours beside the reference" if expected else "yours"
    opened = f", opened at step {found['step']}" if found else ""
    return f"{lead} {whose}{opened}"
