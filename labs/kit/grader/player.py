"""Plays scripts on a submission, inside a sandbox. What it answers is a claim, and checked outside."""

import json
import sys
import types
from typing import Any, BinaryIO

from labs.kit.judge import isolate, random_scripts
from labs.kit.judge.manifest import find_lab
from labs.kit.toys.scripts import Script


def play(request: dict[str, Any], out: BinaryIO) -> None:
    """Of each script that came to an end a line of JSON a call, then an empty line.

    {"broken": why} if the file does not load.
    """
    module = sys.modules["submission"] = types.ModuleType("submission")  # where a dataclass looks itself up
    module.__dict__["__source__"] = request["source"]  # for scripts that ask what loading it needs
    try:
        exec(compile(request["source"], "starter.py", "exec"), module.__dict__)
        if request["others"]:  # the other tasks' code, for some that are judged by themselves
            reference = types.ModuleType("others")
            exec(compile(request["others"], "others.py", "exec"), reference.__dict__)
            lab = find_lab(request["lab"])
            tasks = [lab.task(name) for name in request["tasks"]]
            left, made, two_sets = request["left"], request["made"], request["two_sets"]
            isolate.filled_in(lab, tasks, module, reference, left, made, two_sets)
    except BaseException as error:  # sys.exit() too
        say(out, [json.dumps({"broken": f"{type(error).__name__}: {error}"[:300]})])
        return
    for script in request["scripts"]:
        say(out, log(request["lab"], module, script))


def log(lab_id: str, part: types.ModuleType | None, script: Script) -> list[str]:
    """The model's, where there is no part."""
    lines = []
    try:
        for call, seen, _ in random_scripts.played(lab_id, part, script):
            lines.append(f'{{"call": {json.dumps(call)}, "seen": {seen}}}')
    except BaseException as error:  # what is not written, or leaves the script in another way
        if part is None:
            raise
        ended = {"ended": f"{type(error).__name__}: {error}"[:300]}
        lines.append(json.dumps({"call": ["the script"], "seen": ended}))
    return lines


def say(out: BinaryIO, lines: list[str]) -> None:
    out.write("\n".join([*lines, "", ""]).encode())
    out.flush()
