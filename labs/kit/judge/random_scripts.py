"""Scripts of random calls, played on a part and on the lab's oracle, and compared after each call.

A lab's random_scripts.py draws scripts and plays them; its oracle.py is slow, obviously right, and shares no
code with solution.py. A script that fails is cut to the fewest calls that still fail before it is shown.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import cached_property, lru_cache
from itertools import zip_longest
from numbers import Integral
from textwrap import shorten
from time import monotonic
from typing import Any, cast

from labs.kit.judge import loading
from labs.kit.judge.compare import same
from labs.kit.judge.guard import deadline
from labs.kit.judge.pristine import NOT_WRITTEN
from labs.kit.toys.driver import EXPECTED, PULSE, RUNS, OpHeader, OpLog, OpStep
from labs.kit.toys.scripts import Script, Skip
from labs.kit.toys.words import describe, kind
from mini_engine.trace import End

TRIALS, PATIENCE = 400, 1.0  # of cutting a script: runs, and seconds
SECONDS = 10  # for a script of a fingerprint; those that end take a tenth of it
quick = brief = False  # the story is not read, so no script need be cut; nor where one departs
only: list[int] | None = None  # the scripts to play, where all others are known to pass
passed = 0  # scripts, from the first on, that the part passed which was judged last
WIDTH = 100  # of a line that shows a call


class Step:
    """One call of a script, and what it let be seen: `returned` or `raised`, and the state after it.

    `text` is that as JSON, where it was read; most steps are compared by it alone.
    """

    def __init__(
        self,
        call: list[Any],
        seen: dict[str, Any] | None = None,
        error: BaseException | None = None,
        text: str = "",
    ):
        self.call, self.error, self.text = call, error, text
        if seen is not None:
            self.seen = seen

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Step):
            return NotImplemented
        return (self.call, self.seen, self.error) == (other.call, other.seen, other.error)

    @cached_property
    def seen(self) -> dict[str, Any]:
        return cast(dict[str, Any], json.loads(self.text))

    @cached_property
    def row(self) -> str:
        """Return the row of a step that is the oracle's own."""
        return row(self, self)


def judge(lab_id: str, part: Any) -> None:
    """Play the lab's scripts on `part`; AssertionError with the shortest form of the first that departs."""
    global passed
    __tracebackhide__ = True
    random_scripts, passed = loading.load(lab_id, "random_scripts"), 0
    for number in range(random_scripts.SCRIPTS) if only is None else only:
        script = drawn(lab_id, number)
        play = steps if brief else run  # a step after the other, or the whole script
        if departure(play(lab_id, part, script), expected(lab_id, number)) is not None:
            of_all = f"script {number + 1} of {random_scripts.SCRIPTS} departs"
            if brief:
                raise AssertionError(of_all)
            script = script if quick else cut(lab_id, part, script)
            yours, oracle = run(lab_id, part, script), run(lab_id, None, script)
            if departure(yours, oracle) is None:
                again = "look for state that your code keeps between calls"
                raise AssertionError(f"script {number + 1} departs, but not when it is played again: {again}")
            RUNS[:] = [({"config": script["config"]}, as_log(script, yours))]
            EXPECTED.append(({"config": script["config"]}, as_log(script, oracle)))
            opening = f"{of_all}; cut to the calls that it needs, it is"
            raise AssertionError(story(opening, script, yours, oracle))
        passed += 1


@lru_cache(1024)
def drawn(lab_id: str, seed: object) -> Script:
    """The script of a seed; a string seeds alike in every version of Python."""
    return cast(Script, loading.load(lab_id, "random_scripts").draw(random.Random(f"{lab_id} {seed}")))


@lru_cache(1024)
def expected(lab_id: str, seed: object) -> list[Step]:
    return run(lab_id, None, drawn(lab_id, seed))


def run(lab_id: str, part: Any, script: Script) -> list[Step]:
    """Play a script on `part`, or on the oracle if that is None.

    An error of a call is something seen, and the script goes on; only a task that is not written ends it.
    """
    return list(steps(lab_id, part, script))


def steps(lab_id: str, part: Any, script: Script) -> Iterator[Step]:
    for call, seen, error in played(lab_id, part, script):
        yield Step(call, None, error, seen)


def played(lab_id: str, part: Any, script: Script) -> Iterator[tuple[list[Any], str, BaseException | None]]:
    """Each call of a script, what it let be seen, as JSON, and its error."""
    is_oracle = part is None
    part = loading.load(lab_id, "oracle") if is_oracle else part
    play = loading.load(lab_id, "random_scripts").Play(part, script["config"])
    play.is_oracle = is_oracle  # which may take its time; a part cannot claim it
    for name, *arguments in script["calls"]:
        PULSE[0] += 1
        failed: BaseException | None = None
        try:
            returned = getattr(play, name)(*map(deepcopy, arguments))
            seen = f'{{"returned": {text(returned)}'  # now, as looking may change it
        except Skip:
            continue
        except Exception as error:
            if NOT_WRITTEN.search(str(error)) or isinstance(error, loading.LoadProblem):
                raise
            seen, failed = f'{{"raised": {text(kind(error))}', error
        try:
            more = text(play.seen())[1:]
        except Exception as error:
            more, failed = f'"raised by looking": {text(kind(error))}}}', failed or error
        yield [name, *arguments], f"{seen}{', ' if more != '}' else ''}{more}", failed


def unknown(value: object) -> object:
    """Return what is shown of a value that JSON lacks: of a numpy integer the number, else the type."""
    return int(value) if isinstance(value, Integral) else f"<{type(value).__name__}>"


text = json.JSONEncoder(default=unknown).encode


def departure(yours: Iterable[Step], oracle: Iterable[Step]) -> int | None:
    """The number of the first step in which something else was seen."""
    for number, (a, b) in enumerate(zip_longest(yours, oracle)):
        if a is b:  # a line that is the oracle's own
            continue
        if a is None or b is None or a.call != b.call:
            return number
        if not (a.text == b.text != "" or same(a.seen, b.seen)):
            return number
    return None


def cut(lab_id: str, part: Any, script: Script) -> Script:
    """The script with all calls left out that it does not need to depart; the last one is where it does."""
    end, trials = monotonic() + PATIENCE, 0

    def departs(calls: list[Any]) -> bool:
        nonlocal trials
        trials += 1
        trial = script | {"calls": calls}
        return departure(run(lab_id, part, trial), run(lab_id, None, trial)) is not None

    calls: list[Any] = script["calls"]
    size = len(calls)
    while size >= 1 and trials < TRIALS and monotonic() < end:
        start, shorter = 0, False
        while start < len(calls) and trials < TRIALS and monotonic() < end:
            fewer = calls[:start] + calls[start + size :]
            if departs(fewer):
                calls, shorter = fewer, True
            else:
                start += size
        size = size // 2 if size > 1 else (1 if shorter else 0)
    return script | {"calls": calls}


def story(opening: str, script: Script, yours: list[Step], oracle: list[Step]) -> str:
    """The calls of a failing script, and what the last one should have let be seen."""
    at, lines = departure(yours, oracle) or 0, [opening]
    lines += [f"    {key} = {value}" for key, value in script["config"].items()]
    lines += [f"    {shorten(said(step), WIDTH, placeholder=' ...')}" for step in yours[: at + 1]]
    if at >= len(yours) or at >= len(oracle):
        return "\n".join([*lines, "and here one of the two has ended"])
    a, b = yours[at], oracle[at]
    for key in dict.fromkeys([*b.seen, *a.seen]):
        for where, left, right in differing(key, a.seen.get(key, "nothing"), b.seen.get(key, "nothing")):
            lines.append(f"{where}: {shown(left)}, but should be {shown(right)}")
    if a.error is not None and "raised" not in b.seen:
        line = loading.line_in_starter(a.error)
        lines.append(f"raised{f' in starter.py, line {line}' if line else ''}: {describe(a.error)}")
    return "\n".join(lines)


def differing(where: str, yours: Any, oracle: Any) -> Iterator[tuple[str, Any, Any]]:
    """The places at which two things that were seen differ: of dicts, the entries that do."""
    if isinstance(yours, dict) and isinstance(oracle, dict):
        for key in dict.fromkeys([*oracle, *yours]):
            yield from differing(f"{where}, {key}", yours.get(key, "nothing"), oracle.get(key, "nothing"))
    elif not same(yours, oracle):
        yield where, yours, oracle


def said(step: Step) -> str:
    name, *arguments = step.call
    gave = f"raises {step.seen['raised']}" if "raised" in step.seen else shown(step.seen.get("returned"))
    return f"{name}({', '.join(map(shown, arguments))})" + ("" if gave == "None" else f" -> {gave}")


def shown(value: Any) -> str:
    return shorten(repr(rounded(value))[:2000], 200, placeholder=" ...")  # what is long takes long to shorten


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return {key: rounded(one) for key, one in value.items()} if isinstance(value, dict) else value


def as_log(script: Script, steps: list[Step]) -> OpLog:
    """Return the log that the player shows: an operation a step, with what could be seen after it."""
    log = OpLog(OpHeader(script["config"]))
    for number, step in enumerate(steps):
        seen = dict(step.seen)
        returned = {"raised": seen.pop("raised")} if "raised" in seen else seen.pop("returned", None)
        log.steps.append(OpStep(number, step.call, returned, seen))
    log.end = End("drained", len(steps))
    return log


def fingerprint(lab_id: str, part: Any, passed: int = 0) -> list[str]:
    """Return a digest a script of all that was seen: equal for two parts that no script distinguishes.

    So many scripts, from the first on, are known to pass, and are not played again. Raise TimeUp if one of
    the others needs more than SECONDS.
    """
    digests = [digest_of_oracle(lab_id, n) for n in range(passed)]
    for number in range(passed, count(lab_id)):
        with deadline(SECONDS):
            digests.append(digest(run(lab_id, part, drawn(lab_id, number)), expected(lab_id, number)))
    return digests


def departing(lab_id: str, runs: str) -> list[int] | None:
    """Return the scripts that depart, by a part's fingerprint (JSON); None if its scripts did not end."""
    digests = json.loads(runs) if runs.startswith("[") else []
    return [n for n, one in enumerate(digests) if one != digest_of_oracle(lab_id, n)] or None


@lru_cache(1024)
def digest_of_oracle(lab_id: str, number: int) -> str:
    return digest(expected(lab_id, number), expected(lab_id, number))


def count(lab_id: str) -> int:
    """Return how many scripts the lab's test plays."""
    return int(loading.load(lab_id, "random_scripts").SCRIPTS)


def digest(steps: list[Step], oracle: list[Step]) -> str:
    """Floats differ by platform: of what holds them it counts only which of its rows are the oracle's."""
    pairs = zip_longest(steps, oracle, fillvalue=Step([], {}))
    rows = [b.row if a is b or (a.text == b.text != "" and a.call == b.call) else row(a, b) for a, b in pairs]
    return hashlib.sha256(f"[{', '.join(rows)}]".encode()).hexdigest()[:12]


def row(yours: Step, theirs: Step) -> str:
    seen = {key: canonical(value, theirs.seen.get(key)) for key, value in yours.seen.items()}
    return json.dumps([yours.call, seen], sort_keys=True)


def canonical(value: Any, oracle: Any) -> Any:
    if not has_floats(value):
        return value
    if isinstance(value, list):
        rows = oracle if isinstance(oracle, list) else []
        return [same(a, b) for a, b in zip_longest(value, rows[: len(value)])]
    if isinstance(value, dict):
        parts = oracle if isinstance(oracle, dict) else {}
        return {key: canonical(one, parts.get(key)) for key, one in value.items()}
    return same(value, oracle)


def has_floats(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, float) or any(map(has_floats, parts))
