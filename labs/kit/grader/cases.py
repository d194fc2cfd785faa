"""The cases that a lab is graded by: scripts to play, and what should be seen of each.

Expected runs come from the lab's model, outside of any sandbox; an answer is only ever compared with them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labs.kit.grader import player
from labs.kit.grader.results import Case
from labs.kit.grader.sandbox import Answer, Sandbox, step
from labs.kit.judge import loading, random_scripts
from labs.kit.judge.manifest import Lab
from labs.kit.toys.scripts import Script

if TYPE_CHECKING:
    from labs.kit.grader.grading import Settings


@dataclass(frozen=True)
class Scripted:
    """A case before it is played."""

    name: str
    hidden: bool
    script: str  # JSON


def cases(lab: Lab, settings: Settings) -> list[Scripted]:
    """The public ones, which are those of `labs test`, and the hidden ones, which follow from the seed."""
    graded = getattr(loading.load(lab.id, "random_scripts"), "graded", lambda script: script)

    def drawn(name: str, seed: object, hidden: bool) -> Scripted:
        return Scripted(name, hidden, said(graded(random_scripts.drawn(lab.id, seed))))

    public = [drawn(f"public {n + 1}", n, False) for n in range(random_scripts.count(lab.id))]
    hidden = [drawn(f"hidden {n + 1}", f"{settings.seed} {n}", True) for n in range(settings.hidden)]
    return [*public, *hidden, *own_cases(lab.id, settings.own)]


def own_cases(lab_id: str, folder: Path | None) -> list[Scripted]:
    """An instructor's own scripts: {"config": ..., "calls": [...]} in FOLDER/lab-NN/*.json."""
    if folder is None:
        return []
    files = sorted((folder / lab_id).glob("*.json"))
    return [Scripted(f"own {file.name}", True, said(json.loads(file.read_text("utf-8")))) for file in files]


def said(script: Script) -> str:
    return json.dumps(script, sort_keys=True)


@dataclass(frozen=True)
class Expected:
    """What should be seen of a script, and its lines as a sandbox that is right gives them."""

    steps: list[random_scripts.Step]
    lines: dict[str, random_scripts.Step]


@cache
def expected(lab_id: str, script: str) -> Expected:
    lines = player.log(lab_id, None, json.loads(script))
    known = {line: step(line) for line in lines}
    return Expected([known[line] for line in lines], known)


@cache
def right_digest(lab_id: str, script: str) -> str:
    return random_scripts.digest(expected(lab_id, script).steps, expected(lab_id, script).steps)


def digest(lab_id: str, case: Scripted, log: list[random_scripts.Step]) -> str:
    model = expected(lab_id, case.script).steps
    if random_scripts.departure(log, model) is None:
        return right_digest(lab_id, case.script)
    return random_scripts.digest(log, model)


def play(sandbox: Sandbox, source: str, cases: Sequence[Scripted], **alone: Any) -> Answer:
    """What a sandbox answers; `alone` as in player.py."""
    known = [expected(sandbox.lab.id, case.script).lines for case in cases]
    return sandbox.run(source, [case.script for case in cases], known, **alone)


def judged(lab: Lab, case: Scripted, number: int, answer: Answer) -> Case:
    """One case: what came back beside what should have been seen."""
    if number >= len(answer.logs):
        why = answer.broken or answer.ended
        return Case(case.name, case.hidden, False, why if number == len(answer.logs) else "not begun")
    yours, model = answer.logs[number], expected(lab.id, case.script).steps
    if random_scripts.departure(yours, model) is None:
        return Case(case.name, case.hidden, True)
    text = random_scripts.story(f"{case.name} departs:", json.loads(case.script), yours, model)
    return Case(case.name, case.hidden, False, text)


def passed(lab: Lab, cases: Sequence[Scripted], answer: Answer) -> int:
    """How many of the cases are as they should be."""
    models = (expected(lab.id, case.script).steps for case in cases)
    return sum(random_scripts.departure(*pair) is None for pair in zip(answer.logs, models, strict=False))
