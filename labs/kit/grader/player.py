"""Plays scripts on a submission, inside a sandbox. What it answers is a claim, and checked outside."""

import types
from typing import Any

from labs.kit.judge import storm


def played(request: dict[str, Any]) -> dict[str, Any]:
    """{"logs": of each script [{"call", "seen"}, ...]}, or {"broken": why the file does not load}."""
    module = types.ModuleType("submission")
    try:
        exec(compile(request["source"], "starter.py", "exec"), module.__dict__)
    except BaseException as error:  # sys.exit() too
        return {"broken": f"{type(error).__name__}: {error}"[:300]}
    return {"logs": [log(request["lab"], module, script) for script in request["scripts"]]}


def log(lab_id: str, module: types.ModuleType, script: storm.Script) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    try:
        for step in storm.steps(lab_id, module, script):
            steps.append({"call": step.call, "seen": step.seen})
    except BaseException as error:  # what is not written, or ends the script by another way
        steps.append({"call": [], "seen": {"ended": f"{type(error).__name__}: {error}"[:300]}})
    return steps
