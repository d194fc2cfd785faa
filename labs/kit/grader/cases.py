"""The cases of a lab: scripts that are played on a submission, and the run that each should give.

Expected runs come from the lab's oracle, outside of any sandbox. Answers are only compared with them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from labs.kit.grader import player
from labs.kit.grader.answers import Answer, step
from labs.kit.grader.results import STORY, Case
from labs.kit.grader.sandbox import Sandbox
from labs.kit.grader.submission import Settings
from labs.kit.judge import loading, random_scripts
from labs.kit.judge.manifest import Lab, find_lab
from mini_engine.trace.file import write_whole

shared: Path | None = None  # in a worker of several: where they leave each other what oracles say


@dataclass(frozen=True)
class CaseScript:
    """A case that was not played yet."""

    name: str
    hidden: bool
    script: str  # JSON; the order of its keys is that of the rows of a step


def cases(lab: Lab, settings: Settings) -> list[CaseScript]:
    """Return the public cases of `labs test`, the hidden ones of the seed, and the instructor's own."""
    scripts = drawn(lab.id, random_scripts.count(lab.id), settings.seed, settings.hidden)
    return [*scripts, *own_cases(lab.id, settings.own)]


@lru_cache(64)  # all labs: of one seed they are drawn once
def drawn(lab_id: str, public: int, seed: str, hidden: int) -> list[CaseScript]:
    graded = getattr(loading.load(lab_id, "random_scripts"), "graded", lambda script: script)
    each: list[tuple[str, bool, object]] = [(f"public {n + 1}", False, n) for n in range(public)]
    each += [(f"hidden {n + 1}", True, f"{seed} {n}") for n in range(hidden)]
    return [
        CaseScript(name, is_hidden, json.dumps(graded(random_scripts.drawn(lab_id, one))))
        for name, is_hidden, one in each
    ]


def own_cases(lab_id: str, folder: Path | None) -> list[CaseScript]:
    """Return an instructor's own cases: {"config": ..., "calls": [...]} in FOLDER/lab-NN/*.json."""
    files = sorted((folder / lab_id).glob("*.json")) if folder else []
    texts = [(file.name, json.dumps(json.loads(file.read_text("utf-8")))) for file in files]
    return [CaseScript(f"own {name}", True, text) for name, text in texts]


@dataclass(frozen=True)
class Expected:
    """The run that a script should give, and its steps by the line in which a sandbox reports them."""

    lines: list[str]
    steps: list[random_scripts.Step]
    by_line: dict[str, random_scripts.Step]


@lru_cache(4096)  # with --own-seeds each student has others
def expected(lab_id: str, script: str) -> Expected:
    lines = left(lab_id).get(script) or player.log(lab_id, None, json.loads(script))
    by_line = {line: step(line) for line in lines}
    return Expected(lines, [by_line[line] for line in lines], by_line)


def share(lab_id: str, settings: Settings) -> None:
    """Leave the expected runs of a lab's cases for the other workers, which need not compute them anew."""
    assert shared
    scripts = [case.script for case in cases(find_lab(lab_id), settings)]
    runs = {script: expected(lab_id, script).lines for script in scripts}
    write_whole(shared / f"{lab_id}.json", json.dumps(runs))


@cache
def left(lab_id: str) -> dict[str, list[str]]:
    file = shared and shared / f"{lab_id}.json"
    return json.loads(file.read_text("utf-8")) if file and file.exists() else {}


def digest(lab_id: str, case: CaseScript, log: list[random_scripts.Step]) -> str:
    """Return a digest of a run, for the fingerprints of known mistakes."""
    steps = expected(lab_id, case.script).steps
    departs = random_scripts.departure(log, steps) is not None
    return random_scripts.digest(log if departs else steps, steps)


def play(sandbox: Sandbox, source: str, cases: Sequence[CaseScript], **isolated: Any) -> Answer:
    """Return the sandbox's answer; `isolated` plays some tasks beside the reference's others (player.py)."""
    known = [expected(sandbox.lab.id, case.script).by_line for case in cases]
    return sandbox.run(source, [case.script for case in cases], known, **isolated)


def play_apart(sandbox: Sandbox, source: str, cases: Sequence[CaseScript]) -> Answer:
    """Play the public cases, then the hidden ones in a batch of their own.

    So a submission that reads all scripts of its batch has no hidden one to put into what students are shown.
    """
    public, hidden = ([case for case in cases if case.hidden == which] for which in (False, True))
    answer = play(sandbox, source, public)
    if answer.broken or answer.ended or not hidden:
        return answer
    more = play(sandbox, source, hidden)
    reason = more.ended if more.ended.startswith(("no answer within", "more than")) else "its process ended"
    ended = bool(more.ended or more.broken)
    return Answer(answer.logs + more.logs, ended=reason if ended else "", in_hidden=ended)


def judged(lab: Lab, case: CaseScript, number: int, answer: Answer) -> Case:
    """Return the result of a case: its run in the answer, compared with the expected one."""
    if number >= len(answer.logs):
        why = answer.broken or answer.ended
        return Case(case.name, case.hidden, False, why if number == len(answer.logs) else "not begun")
    yours, oracle = answer.logs[number], expected(lab.id, case.script).steps
    if random_scripts.departure(yours, oracle) is None:
        return Case(case.name, case.hidden, True)
    text = random_scripts.story(f"{case.name} departs:", json.loads(case.script), yours, oracle)
    return Case(case.name, case.hidden, False, text[:STORY])


def num_passed(lab: Lab, cases: Sequence[CaseScript], answer: Answer) -> int:
    oracles = (expected(lab.id, case.script).steps for case in cases)
    return sum(random_scripts.departure(*pair) is None for pair in zip(answer.logs, oracles, strict=False))
