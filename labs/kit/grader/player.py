"""Plays scripts on a submission, inside a sandbox. What it answers is a claim, and checked outside."""

import json
import sys
import types
from typing import Any, BinaryIO

from labs.kit.judge import isolate, storm
from labs.kit.judge.manifest import find_lab
from labs.kit.toys.storms import Script


def play(request: dict[str, Any], out: BinaryIO) -> None:
    """A line of JSON for each script that came to an end; {"broken": why} if the file does not load."""
    module = sys.modules["submission"] = types.ModuleType("submission")  # where a dataclass looks itself up
    module.__dict__["__source__"] = request["source"]  # for a storm that asks what loading it needs
    try:
        exec(compile(request["source"], "starter.py", "exec"), module.__dict__)
        if request["others"]:  # the other tasks' code, for some that are judged by themselves
            reference = types.ModuleType("others")
            exec(compile(request["others"], "others.py", "exec"), reference.__dict__)
            lab = find_lab(request["lab"])
            tasks = [lab.task(name) for name in request["tasks"]]
            isolate.filled_in(lab, tasks, module, reference, request["left"], request["made"])
    except BaseException as error:  # sys.exit() too
        say(out, {"broken": f"{type(error).__name__}: {error}"[:300]})
        return
    for script in request["scripts"]:
        say(out, log(request["lab"], module, script))


def log(lab_id: str, module: types.ModuleType, script: Script) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    try:
        for step in storm.steps(lab_id, module, script):
            steps.append({"call": step.call, "seen": step.seen})
    except BaseException as error:  # what is not written, or leaves the script in another way
        steps.append({"call": ["the script"], "seen": {"ended": f"{type(error).__name__}: {error}"[:300]}})
    return steps


def say(out: BinaryIO, value: Any) -> None:
    out.write(json.dumps(value, allow_nan=False).encode() + b"\n")
    out.flush()
