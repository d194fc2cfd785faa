"""Puts the run of a failed test into the player, beside the reference's: out/lab-NN.html.

A session's first failure of a lab gets the page; none that follows overwrites it.
"""

from pathlib import Path

from labs.kit.judge import compare
from labs.kit.judge.guard import deadline
from labs.kit.judge.manifest import Lab
from labs.kit.toys.words import describe

SECONDS = 5.0
_written: set[str] = set()  # labs whose page this session has made


def path_of(lab: Lab) -> Path:
    """Where a lab's page lies, in the course's folder."""
    return lab.path.parents[1] / "out" / f"{lab.id}.html"


def write(lab: Lab, yours: compare.Runs, reference: compare.Runs, may_write: bool = True) -> str:
    """Write the page, and give the line that names it; "" where there is no step to play.

    It opens at the step where the two part. Without a reference it shows yours alone, of which there is
    one at least. Whatever the run was like, this raises nothing but KeyboardInterrupt.
    """
    name = f"out/{path_of(lab).name}"
    try:
        with deadline(SECONDS):
            run, expected, step = _chosen(yours, reference)
            if not run.steps:
                return ""
            if lab.id in _written or not may_write:
                return f"{name} shows this session's first failure; run this test alone to see it there"
            from mini_engine.show.player import write_player

            expected = expected if expected and expected.steps else None
            write_player(path_of(lab), run, expected, names=("yours", "reference"))
            _written.add(lab.id)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # TimeUp, too
        return f"no page for the player: {describe(error)}"
    at = "" if step is None else f"#step={step}"
    return f"{name}{at} in a browser: yours{' beside the reference' if expected else ''}, step by step"


def _chosen(
    yours: compare.Runs, reference: compare.Runs
) -> tuple[compare.Run, compare.Run | None, int | None]:
    """The run to look at, the reference's, and the step where they part: the first that does, or the last."""
    number, found = compare.first_apart(yours, reference) or (len(yours) - 1, None)
    record = found and (found.yours or found.reference)
    expected = reference[number][1] if number < len(reference) else None
    return yours[number][1], expected, record.step if record else None
