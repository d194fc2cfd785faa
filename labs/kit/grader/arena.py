"""Plays a class's policies in the grader's sandbox. What comes out are decisions, judged out here.

A policy is FOLDER/NAME.py, or the one .py file, or policy.py, of a folder or zip FOLDER/NAME.
"""

import atexit
import json
import tempfile
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

from labs.kit.arena.board import SECONDS, Row
from labs.kit.arena.games import GAMES
from labs.kit.arena.referee import Foul, judged
from labs.kit.grader import workers
from labs.kit.grader.contents import Found, Refused, contents, read_file
from labs.kit.grader.grading import isolation
from labs.kit.grader.names import printable, safe
from labs.kit.grader.sandbox import ROOT, Sandbox, allowance, copy, is_root, twins
from labs.kit.judge.manifest import LabError, find_lab

LAB = "lab-03"  # a policy may import what this lab's file may


class ArenaSandbox(Sandbox):
    """A sandbox with the whole scheduler in it: a policy replaces parts of it, and answers no lab."""

    libraries = (*Sandbox.libraries, "labs.kit.arena.play")

    def __init__(self, folder: Path, weak: bool):
        super().__init__(find_lab(LAB), folder, SECONDS, weak)
        whole = [f"{module.replace('.', '/')}.py" for module in twins(self.lab)]
        for name in (*whole, *(f"labs/kit/arena/{name}.py" for name in ("__init__", "games", "play"))):
            copy(ROOT / name, self.course / name)


@cache
def box(weak: bool) -> ArenaSandbox:
    """Return this process's sandbox."""
    folder = tempfile.TemporaryDirectory(prefix="arena-")
    made = ArenaSandbox(Path(folder.name), weak)
    atexit.register(folder.cleanup)
    atexit.register(made.stop)
    return made


def play(name: str, source: str, seed: int, weak: bool) -> Row:
    """Return the row of a policy that is played in the sandbox, each game by itself."""
    sandbox, scores = box(weak), {}
    sandbox.begin(allowance(1, SECONDS))
    for game in GAMES:
        script = json.dumps({"game": game.name, "seed": seed})
        answer = sandbox.run(source, [script], [{}], lab=f"a policy as in {LAB}", arena=True)
        if answer.broken:
            return Row(name, foul=printable(f"it does not load: {answer.broken}"))
        decisions = [step.seen for step in answer.logs[0]] if answer.logs else []
        ended = answer.ended
        if decisions and "ended" in decisions[-1]:
            ended = str(decisions.pop()["ended"])
        try:
            scores[game.name] = judged(game, seed, decisions, ended)
        except Foul as foul:
            return Row(name, foul=printable(f"{game.name}, {foul}")[:500])
    return Row(name, scores)


def source_of(path: Path) -> str:
    """Return a student's policy. Raise Refused, with the reason, if there is none."""
    with ExitStack() as opened:
        if path.suffix == ".py" and not path.is_dir():
            files = [Found(path.name, open=partial(read_file, path))]
        else:
            files = [one for one in contents(path, opened) if one.name.endswith(".py")]
        if len(files) != 1:
            files = [one for one in files if one.name.rpartition("/")[2] == "policy.py"]
        if len(files) != 1:
            raise Refused("it has no file policy.py, or several; hand in one")
        if files[0].refused:
            raise Refused(files[0].refused)
        return files[0].read().decode("utf-8-sig")


def row_of(path: Path, seed: int, weak: bool) -> Row:
    """Return the row of a student; called in a worker."""
    name = safe(path.name)
    try:
        return play(name, source_of(path), seed, weak)
    except UnicodeDecodeError:
        return Row(name, foul="it is not UTF-8 text")
    except (Refused, OSError) as error:
        return Row(name, foul=printable(str(error)))


def play_class(folder: Path, seed: int, jobs: int, weak: bool, as_root: bool) -> list[Row]:
    """Return the rows of a class, by name. Raise LabError where nothing isolates the policies."""
    if is_root() and not as_root:
        raise LabError(workers.ROOT)
    if not folder.is_dir():
        raise LabError(f"{folder} is not a folder; it should hold a policy for each student")
    found = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    if not found:
        raise LabError(f"{folder} is empty; it should hold a policy for each student")
    strong = isolation() == "namespaces"
    if not (strong or weak):
        raise LabError(
            "this machine offers no namespaces, or has no bwrap, to run policies in; "
            "--allow-weak-isolation plays them without"
        )
    crew = workers.Local(min(jobs or workers.cores(), len(found)))
    try:
        coming = [crew.executor.submit(row_of, path, seed, not strong) for path in found]
        return [one.result() for one in coming]
    except BrokenExecutor:
        raise LabError("a worker was killed; was there enough memory? --jobs 1 needs the least") from None
    finally:
        crew.stop()
