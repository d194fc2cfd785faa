"""Finds the tasks at fault among methods that no test can tell apart: they share an object of the file's own.

A random script that departs is played again without the calls that enter a task. If it passes then, this task
explains it.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from types import FrameType
from typing import Any

from labs.kit.judge import loading, random_scripts
from labs.kit.judge.guard import deadline, kept_alive, silence
from labs.kit.judge.manifest import Lab, find_lab
from labs.kit.toys.scripts import Script
from labs.kit.toys.words import kind

FEW = 8  # departing scripts that are played again, once for each task
ENOUGH = 3  # calls of a kind that show which tasks it enters
Departing = Callable[[Sequence[Script]], Sequence[str]]  # each script's call that departs; "" for none


def explaining(lab_id: str, tasks: Sequence[str], scripts: Sequence[Script], play: Departing) -> list[str]:
    """Return the tasks that explain why these scripts depart, the first of them the most; [] if none does.

    Of two that explain the same, it is the one without which more of the scripts is left: without admissions
    no other call has a place. If none explains a script, it is the one most of the departing calls enter.
    """
    by_call, found, left = entered(lab_id), [], list(scripts)
    while left:
        best, explained = (0, -1), [False] * len(left)
        for task in tasks:
            others = ([call for call in s["calls"] if task not in by_call.get(call[0], ())] for s in left)
            trials = [script | {"calls": calls} for script, calls in zip(left, others, strict=True)]
            if task in found or trials == left:
                continue
            passing = [not call for call in play(trials)]
            steps = sum(len(expected(lab_id, json.dumps(trial))) for trial in trials)
            if any(passing) and (sum(passing), steps) > best:
                best, explained, name = (sum(passing), steps), passing, task
        if not any(explained):
            break
        found.append(name)
        left = [script for script, one in zip(left, explained, strict=True) if not one]
    if not found and scripts:
        calls = Counter(task for call in play(scripts) for task in by_call.get(call, ()) if task in tasks)
        found = [task for task, _ in calls.most_common(1)]
    return found


def departing(lab: Lab, part: Any) -> Departing:
    """Return what plays scripts on `part`, in this process, and says at which call each departs."""

    def call_of(script: Script) -> str:
        try:
            with deadline(lab.timeout), silence(), kept_alive():
                yours = random_scripts.run(lab.id, part, script)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # TimeUp, too
            return kind(error)
        return departing_call(yours, expected(lab.id, json.dumps(script)))

    return lambda scripts: [call_of(script) for script in scripts]


def departing_call(yours: Sequence[random_scripts.Step], oracle: Sequence[random_scripts.Step]) -> str:
    at = random_scripts.departure([*yours], [*oracle])
    return "" if at is None else str((oracle[at] if at < len(oracle) else yours[at]).call[0])


@lru_cache(1024)
def expected(lab_id: str, script: str) -> list[random_scripts.Step]:
    return random_scripts.run(lab_id, None, json.loads(script))


@cache
def entered(lab_id: str) -> dict[str, set[str]]:
    """Return by call of the lab's scripts the tasks that it enters in the reference.

    Tasks that are looked at after every call are left out, and so are calls that use an object of their own.
    """
    reference, tasks = loading.load(lab_id, "solution"), [task.name for task in find_lab(lab_id).tasks]
    found: dict[str, set[str]] = {}
    times: Counter[str] = Counter()

    def note(call: str, function: Callable[..., object], *arguments: Any) -> None:
        def look(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename == reference.__file__:
                names = (task for task in tasks if f"{code.co_qualname}.".startswith(f"{task}."))
                found.setdefault(call, set()).update(names)

        others = sys.getprofile()
        sys.setprofile(look if times[call] < ENOUGH else others)
        try:
            function(*arguments)
            times[call] += 1
        except Exception:  # it was refused, or has no place in its script
            pass
        finally:
            sys.setprofile(others)

    module = loading.load(lab_id, "random_scripts")
    for number in range(random_scripts.count(lab_id)):
        script = random_scripts.drawn(lab_id, number)
        if all(times[name] >= ENOUGH for name, *_ in script["calls"]):
            continue
        play = module.Play(reference, script["config"])
        for name, *arguments in script["calls"]:
            note(name, getattr(play, name), *arguments)
            note("", play.seen)
    looked_at = found.pop("", set())
    makers = {call for call, names in found.items() if len(names) > 1 and any("__init__" in n for n in names)}
    return {call: names - looked_at for call, names in found.items() if call not in makers}
