"""Sentences on traces: labs 01 to 04 and 07. The rules follow the order of a step.

Both runs agree up to the step where they part, so the state before it is the same in both.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from labs.kit.judge.sentences.calls import Found, plainest, schedules
from labs.kit.judge.sentences.rules import Clauses
from labs.kit.judge.sentences.words import count, listing, value
from mini_engine.trace import Event, Finished, Preempted, Queued, RequestView, Scheduled, StepTrace, Trace
from mini_engine.trace.fold import Fold


@dataclass
class Parting:
    """The step in which two runs part: both records, the config, and the requests before the step."""

    trace: Trace  # the reference's
    number: int
    yours: StepTrace
    theirs: StepTrace

    @property
    def step(self) -> str:
        return f"Your step {self.number}"

    @property
    def config(self) -> dict[str, Any]:
        return self.trace.header.config

    @cached_property
    def before(self) -> dict[str, RequestView]:
        """The requests as the step found them, its own arrivals included."""
        fold = Fold(self.trace.header)
        for record in self.trace.steps[: self.number]:
            fold.add(record)
        return dict(fold.settle())

    def of(self, kind: type[Event], own: bool) -> dict[str, Any]:
        """Return the events of a kind in one of the two steps, by id and in their order."""
        events = (self.yours if own else self.theirs).events
        return {event.id: event for event in events if isinstance(event, kind)}

    def left(self, name: str, own: bool) -> int:
        """Return what is left of the budget where a request's turn comes; below 0 if it is overdrawn."""
        left = int(self.config["max_num_batched_tokens"])
        for other, num_tokens in (self.yours if own else self.theirs).scheduled.items():
            if other == name:
                break
            left -= num_tokens
        return left


def ended(yours: Trace, reference: Trace, index: int) -> Clauses:
    """One of the two runs has ended before this step."""
    if index < len(yours.steps):
        goes_on = f"Your run goes on in step {index}, which {schedules(yours.steps[index].scheduled)}"
        return "end", goes_on, "the reference's run is over by then"
    end = yours.end
    work = schedules(reference.steps[index].scheduled)
    error = end.error or "" if end else ""
    if refused := re.fullmatch(r"ScheduleError: (.+)", error):
        return "chunk", f"In your step {index} {refused[1]}", f"the reference's step {index} {work}"
    how = {"error": f"with {error}", "drained": "with nothing left to do"} if end else {}
    said = how.get(end.end if end else "", "there")
    return "end", f"Your run ends before step {index}, {said}", f"the reference's step {index} {work}"


def queued(at: Parting) -> Found:
    yours, theirs = at.of(Queued, True), at.of(Queued, False)
    for name in dict.fromkeys([*theirs, *yours]):
        if name not in yours or name not in theirs:
            words = ("is queued", "is not") if name in yours else ("is not queued", "is")
            yield "queued", f"In step {at.number} {name} {words[0]}", f"in the reference it {words[1]}"
            continue
        for key in ("arrival", "priority", "num_prompt_tokens", "max_tokens"):
            a, b = getattr(yours[name], key), getattr(theirs[name], key)
            if a != b:
                own = f"In step {at.number} {name} is queued with {key} {a}"
                yield "queued", own, f"in the reference with {b}"


def aborted(at: Parting) -> Found:
    """Aborts come before a step is scheduled."""
    events = (at.of(Finished, own).values() for own in (True, False))
    yours, theirs = ({event.id for event in those if event.reason == "abort"} for those in events)
    for name in sorted(yours - theirs):
        yield "finish", f"{at.step} aborts {name}", "the reference does not"
    for name in sorted(theirs - yours):
        yield "finish", f"{at.step} does not abort {name}", "the reference does"


def preempted(at: Parting) -> Found:
    yours, theirs = at.of(Preempted, True), at.of(Preempted, False)
    preempts, should = f"{at.step} preempts {listing(yours)}", f"the reference preempts {listing(theirs)}"
    a, b = next(iter(yours.values()), None), next(iter(theirs.values()), None)
    if list(yours) == list(theirs):
        if a and b and (a.needs, a.free) != (b.needs, b.free):
            yield "memory", f"{preempts}, as {short(a)}", f"in the reference {short(b)}"
        elif a and b and a.for_ != b.for_:
            yield "preemption", f"{preempts} for {a.for_}", f"the reference does so for {b.for_}"
    elif a and not b:
        yield "preemption", f"{preempts}, when {short(a)}", should
    elif b and not a:
        yield "preemption", preempts, f"{should}, as {short(b)}"
    elif set(yours) == set(theirs):
        yield "victim", f"{preempts} in this order", should
    elif set(yours) > set(theirs) or set(yours) < set(theirs):
        yield "preemption", preempts, should
    else:
        mine = next(name for name in yours if name not in theirs)
        other = next(name for name in theirs if name not in yours)
        yield "victim", f"{at.step} preempts {who(at, mine)}", f"the reference preempts {who(at, other)}"


def short(event: Preempted) -> str:
    return f"the running requests need {count(event.needs, 'block')} and {event.free} are free"


def who(at: Parting, name: str) -> str:
    """Name a request with what decides on a victim."""
    view = at.before.get(name)
    if view is None:
        return name
    priority = f"priority {view.priority}, " if at.config.get("policy") == "priority" else ""
    return f"{name} ({priority}arrival {view.arrival})"


def admitted(at: Parting) -> Found:
    yours, theirs = at.of(Scheduled, True), at.of(Scheduled, False)
    for name in yours:
        if name not in theirs:
            yield "admission", f"{at.step} admits {name}", f"the reference does not{why_not(at, name)}"
    for name in theirs:
        if name not in yours:
            gives = f"gives it {count(at.theirs.scheduled.get(name, 0), 'token')}"
            yield "admission", f"{at.step} does not admit {name}", f"the reference does, and {gives}"
    yield from order("admission order", f"{at.step} admits", yours, theirs)
    for name, event in yours.items():
        a, b = event.num_cached_tokens, theirs[name].num_cached_tokens
        if a != b:
            admits = f"{at.step} admits {name} with {count(a, 'computed token')}"
            yield "cached", admits, f"the reference with {b}"


def why_not(at: Parting, name: str) -> str:
    """Say why the reference does not admit a request in this step."""
    blocked, view = at.theirs.blocked, at.before.get(name)
    if blocked.id is None or view and view.running:
        return ""
    if blocked.id != name:
        return f": {blocked.id} stands before it in the queue"
    if blocked.reason == "memory":
        reserve = at.config.get("watermark") if at.theirs.num_running else 0
        kept = f", a reserve of {reserve} included" if reserve else ""
        return f": it needs {count(blocked.needs, 'block')}{kept}, and {blocked.free} are free"
    return {
        "slots": f": {at.theirs.num_running} requests run, and at most {at.config['max_num_seqs']} may",
        "budget": f": the budget of {at.config['max_num_batched_tokens']} is used up",
        "preempted": ": it has preempted in this step",
    }.get(blocked.reason, "")


def rows(at: Parting) -> Found:
    yours, theirs = at.yours.scheduled, at.theirs.scheduled
    for name in dict.fromkeys([*theirs, *yours]):
        if name not in theirs:
            gives = f"{at.step} gives {name} {count(yours[name], 'token')}"
            yield "row", gives, f"the reference leaves it out{nothing_for(at, name)}"
        elif name not in yours:
            gives = f"the reference gives it {count(theirs[name], 'token')}"
            yield "row", f"{at.step} leaves {name} out", gives
        elif yours[name] != theirs[name]:
            yield chunk(at, name, yours[name], theirs[name])
    yield from order("row order", f"{at.step} serves", yours, theirs)


def nothing_for(at: Parting, name: str) -> str:
    """Say why the reference gives a running request nothing in this step."""
    view, budget = at.before.get(name), at.config["max_num_batched_tokens"]
    if sum(at.theirs.scheduled.values()) >= budget:
        return f": the others use up the budget of {budget}"
    return ": nothing of it is left to compute" if view and view.num_new_tokens == 0 else ""


def chunk(at: Parting, name: str, yours: int, theirs: int) -> Clauses:
    """One request gets another number of tokens."""
    budget, threshold = at.config["max_num_batched_tokens"], at.config.get("long_prefill_token_threshold", 0)
    gives, should = f"{at.step} gives {name} {count(yours, 'token')}", f"the reference gives it {theirs}"
    left, view = at.left(name, True), at.before.get(name)
    if yours > left:
        return "budget", f"{gives}, and {max(0, left)} of the budget of {budget} are left", should
    if threshold and yours > threshold == theirs:
        return "threshold", gives, f"{should}, the threshold"
    if view and view.running and view.num_new_tokens == theirs:
        return "chunk", gives, f"{should}, all that is left of it to compute"
    if theirs == at.left(name, False):
        return "chunk", gives, f"{should}, all that is left of the budget of {budget}"
    return "chunk", gives, f"{should}, the threshold" if theirs == threshold else should


def counts(at: Parting) -> Found:
    a, b = at.yours, at.theirs
    if a.num_free_blocks != b.num_free_blocks:
        left = f"{at.step} leaves {count(a.num_free_blocks, 'block')} free"
        yield "memory", left, f"the reference leaves {b.num_free_blocks}"
    for key, words in (("num_running", "running"), ("num_waiting", "waiting")):
        mine, other = getattr(a, key), getattr(b, key)
        if mine != other:
            left = f"{at.step} leaves {count(mine, 'request')} {words}"
            yield "count", left, f"the reference leaves {other} {words}"


def tokens(at: Parting) -> Found:
    yours, theirs = at.yours.new_tokens, at.theirs.new_tokens
    for name in dict.fromkeys([*theirs, *yours]):
        a, b = yours.get(name, []), theirs.get(name, [])
        if len(a) != len(b):
            gets = f"{at.step} yields {count(len(a), 'new token')} for {name}"
            yield "tokens", gets, f"in the reference {len(b)}"
        if len(a) == len(b) > 1 and a != b:
            gets = f"{at.step} yields the tokens {listing(a)} for {name}"
            yield "tokens", gets, f"in the reference {listing(b)}"
        for mine, other in zip(a, b, strict=False):
            if mine != other:
                gets = f"{at.step} yields token {value(mine)} for {name}"
                yield "tokens", gets, f"in the reference {value(other)}"
    yield from order("tokens", f"{at.step} yields tokens for", yours, theirs)


def finished(at: Parting) -> Found:
    yours, theirs = at.of(Finished, True), at.of(Finished, False)
    for name in dict.fromkeys([*theirs, *yours]):
        a, b = map(end_of, (yours.get(name), theirs.get(name)))
        if a != b:
            yield "finish", f"After step {at.number} {name} {a}", f"in the reference it {b}"
    yield from order("finish", f"{at.step} ends", yours, theirs)


def end_of(event: Finished | None) -> str:
    if event is None:
        return "goes on"
    return f"ends with {event.reason!r}" if event.reason else "ends without a reason"


def order(rule: str, does: str, yours: Iterable[str], theirs: Iterable[str]) -> Found:
    if list(yours) != list(theirs):
        yield rule, f"{does} {listing(yours)} in this order", f"the reference {listing(theirs)}"


RULES: list[Callable[[Parting], Found]] = [
    queued, aborted, preempted, admitted, rows, counts, tokens, finished, plainest,
]  # fmt: skip
