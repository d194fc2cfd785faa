"""Plays scripts on a submission, inside a sandbox. Its answer is a claim, and checked outside."""

import json
import sys
import types
from functools import cache, partial
from typing import Any, BinaryIO

from labs.kit.grader import imports
from labs.kit.judge import isolate, manifest, random_scripts
from labs.kit.toys.scripts import Script

find_lab = cache(manifest.find_lab)  # read once: a batch finds the folder of the course empty


def play(request: dict[str, Any], out: BinaryIO) -> None:
    """Write a line of JSON for each call of a script, and an empty line after each script.

    A file that does not load gives {"broken": why}.
    """
    module = types.ModuleType("submission")
    sys.modules["submission"] = module  # where a dataclass looks its module up
    module.__dict__["__source__"] = request["source"]  # for scripts that check its imports
    if request["allowed"] is not None:
        module.__dict__["__builtins__"] = imports.enclosed(request["lab"], request["allowed"])
        imports.hide_the_reference()
    try:
        exec(compile(request["source"], "starter.py", "exec"), module.__dict__)
        if request["others"]:  # the reference, for tasks that are played by themselves
            reference = types.ModuleType("others")
            exec(compile(request["others"], imports.REFERENCE, "exec"), reference.__dict__)
            lab = find_lab(request["lab"])
            tasks = [lab.task(name) for name in request["tasks"]]
            unwritten, made, two_sets = request["unwritten"], request["made"], request["two_sets"]
            isolate.filled_in(lab, tasks, module, reference, unwritten, made, two_sets)
    except BaseException as error:  # sys.exit() too
        write(out, [json.dumps({"broken": f"{type(error).__name__}: {error}"[:300]})])
        return
    if request.get("arena"):  # it is copied into the arena's sandbox only
        from labs.kit.arena.play import lines as log_of
    else:
        log_of = partial(log, request["lab"])
    for script in request["scripts"]:
        write(out, log_of(module, script))


def log(lab_id: str, part: types.ModuleType | None, script: Script) -> list[str]:
    """Return the lines of a script's run: of the oracle where there is no part."""
    lines = []
    try:
        for call, seen, _ in random_scripts.played(lab_id, part, script):
            lines.append(f'{{"call": {json.dumps(call)}, "seen": {seen}}}')
    except BaseException as error:  # an unwritten function, or one that leaves the script in another way
        if part is None:
            raise
        ended = {"ended": f"{type(error).__name__}: {error}"[:300]}
        lines.append(json.dumps({"call": ["the script"], "seen": ended}))
    return lines


def write(out: BinaryIO, lines: list[str]) -> None:
    out.write("\n".join([*lines, "", ""]).encode())
    out.flush()
