"""Sentences on logs of operations: labs 05 and 06, and the random scripts of all labs.

A call's record says what it returned or raised, and the state that could be seen after it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from labs.kit.judge.compare import comparable
from labs.kit.judge.sentences.rules import Clauses, Sentence
from labs.kit.judge.sentences.words import NOTHING, count, listing, pair, place, places, value
from labs.kit.toys.driver import OpLog, OpStep

RAISED = "raised"  # the key of what a call raised, in `returned`
STEPS = ("step", "schedule")  # calls that return the rows of a step
GRANTS = {"admit": "admits", "admit_again": "admits", "admit_all": "admits", "allocate": "finds room for"}
KINDS = {  # a word in the key of what was seen: the rule
    "Deltas": "text", "published": "cached", "found": "cached", "misused": "calls", "calls": "calls",
    "logits": "tensor", "keys": "tensor", "values": "tensor", "mask": "tensor", "query": "tensor",
    "past_lens": "tensor", "is_last": "tensor", "slot": "tensor", "inbox": "queue", "status": "finish",
    "finish": "finish", "token_ids": "tokens", "num_": "counter", "arrival": "counter", "priority": "counter",
    "max_tokens": "counter", "computed": "counter", "cached": "cached", "tokens": "tensor",
    "positions": "tensor", "request": "counter", "pool": "counter",
}  # fmt: skip


@dataclass
class Parting:
    """The call at which two logs part: both records, and the state that both saw before it."""

    yours: OpStep
    theirs: OpStep
    before: dict[str, Any]

    @property
    def call(self) -> str:
        return f"In step {self.yours.step} your {call_of(self.yours)}"

    @property
    def after(self) -> str:
        return f"After step {self.yours.step}, {call_of(self.yours)},"

    def seen(self, key: str) -> tuple[Any, Any]:
        """Return what the two saw under a key after the call; None where there is none."""
        return self.yours.observed.get(key), self.theirs.observed.get(key)


def sentence(yours: OpLog, reference: OpLog, index: int) -> Sentence:
    """Return the sentence on the call at which two logs part."""
    if index >= len(yours.steps) or index >= len(reference.steps):
        return Sentence(*ended(yours, reference, index))
    before = reference.steps[index - 1].observed if index else {}
    at = Parting(yours.steps[index], reference.steps[index], before)
    return next(Sentence(*found) for rule in RULES for found in rule(at))


def ended(yours: OpLog, reference: OpLog, index: int) -> Clauses:
    if index < len(yours.steps):
        call = call_of(yours.steps[index])
        return "end", f"Your run goes on with {call} in step {index}", "the reference's is over by then"
    step = reference.steps[index]
    how = f" with {yours.end.error}" if yours.end and yours.end.error else ""
    return (
        "end",
        f"Your run ends at {call_of(step)} in step {index}{how}",
        f"the reference {gives(step)} there",
    )


def call_of(step: OpStep) -> str:
    name, *arguments = step.op
    return f"{name}({', '.join(map(value, arguments))})"


def gives(step: OpStep) -> str:
    if has_raised(step):
        return f"raises {step.returned[RAISED]}"
    return "returns" if step.returned is None else f"returns {value(step.returned)}"


def has_raised(step: OpStep) -> bool:
    return isinstance(step.returned, dict) and list(step.returned) == [RAISED]


Found = Iterator[Clauses]


def raised(at: Parting) -> Found:
    if at.yours.returned != at.theirs.returned and (has_raised(at.yours) or has_raised(at.theirs)):
        yield "raised", f"{at.call} {gives(at.yours)}", f"the reference {gives(at.theirs)}"


def refused(at: Parting) -> Found:
    """A yes where there should be a no, or the other way round."""
    name, *arguments = at.yours.op
    refuses, should = at.yours.returned is False, at.theirs.returned is False
    if refuses == should:
        return
    free = at.before.get("num_free_blocks")
    there = f" with {count(free, 'free block')}" if isinstance(free, int) and name in GRANTS else ""
    grants = f"{GRANTS[name]} {arguments[0]}" if name in GRANTS else "does not refuse"
    if refuses:
        yield "refusal", f"{at.call} refuses{there}", f"the reference {grants}"
    else:
        yield "refusal", f"{at.call} {grants}{there}", "the reference refuses"


def changed(at: Parting) -> Found:
    """Report a change of something that the call may only read."""
    for key, mine in at.yours.observed.items():
        if "changed" in key and isinstance(mine, list) and mine != at.theirs.observed.get(key):
            yield "changed", f"{at.call} changes {listing(mine)}", "in the reference it stays as it is"


def preempted(at: Parting) -> Found:
    """The victims of a step, by the counters that went up."""
    were = preemptions(at.before)
    yours, theirs = (
        [name for name, times in preemptions(step.observed).items() if times > were.get(name, 0)]
        for step in (at.yours, at.theirs)
    )
    if at.yours.op[0] in STEPS and sorted(yours) != sorted(theirs):
        rule = "victim" if len(yours) == len(theirs) else "preemption"
        step = f"Your step {at.yours.step} preempts {listing(yours)}"
        yield rule, step, f"the reference preempts {listing(theirs)}"


def preemptions(observed: dict[str, Any]) -> dict[str, int]:
    """Return how often each request was preempted, as far as it can be seen."""
    end = ".num_preemptions"
    own = {key.removesuffix(end): times for key, times in observed.items() if key.endswith(end)}
    found: dict[str, int] = own or observed.get("num_preemptions", {})
    return found


def rows(at: Parting) -> Found:
    """A schedule: the rows [id, tokens] of labs 01 and 03."""
    a, b = at.yours.returned, at.theirs.returned
    if at.yours.op[0] not in STEPS or a == b or not (is_schedule(a) and is_schedule(b)):
        return
    yours, theirs, ran = dict(a), dict(b), at.before.get("running", [])
    step, settings = f"Your step {at.yours.step}", at.yours.op[1:]
    for name in dict.fromkeys([*theirs, *yours]):
        mine, other = yours.get(name), theirs.get(name)
        if mine == other:
            continue
        gives, should = (
            f"gives {name} {count(mine, 'token')}",
            f"the reference gives it {count(other, 'token')}",
        )
        spent = sum(list(yours.values())[: list(yours).index(name)]) if mine else 0
        if other is None and name not in ran:
            why = why_not(name, at.theirs, theirs)
            yield "admission", f"{step} admits {name} and {gives.replace(name, 'it')}", f"the reference {why}"
        elif mine is None and name not in ran:
            yield "admission", f"{step} does not admit {name}", f"the reference does, and gives it {other}"
        elif other is None:
            yield "row", f"{step} {gives}", "the reference leaves it out"
        elif mine is None:
            yield "row", f"{step} leaves {name} out", should
        elif settings and spent + mine > settings[0]:
            left = f"{max(0, settings[0] - spent)} of the budget of {settings[0]} are left"
            yield "budget", f"{step} {gives}, and {left}", should
        else:
            yield "chunk", f"{step} {gives}", should
    yield "row order", f"{step} serves {listing(yours)} in this order", f"the reference {listing(theirs)}"


def why_not(name: str, theirs: OpStep, scheduled: dict[str, int]) -> str:
    """Say why the reference does not admit a request."""
    running, waiting, settings = (*map(theirs.observed.get, ("running", "waiting")), theirs.op[1:])
    if settings and sum(scheduled.values()) >= settings[0]:
        return f"does not: its budget of {settings[0]} is used up"
    if len(settings) > 1 and running and len(running) >= settings[1]:
        return f"does not: {count(len(running), 'request')} run, and at most {settings[1]} may"
    if waiting and name in waiting[1:]:
        return f"does not: {waiting[0]} stands before it in the queue"
    free = theirs.observed.get("num_free_blocks")
    return f"does not, with {count(free, 'free block')}" if isinstance(free, int) else "does not"


def is_schedule(returned: Any) -> bool:
    return isinstance(returned, list) and all(
        isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) for row in returned
    )


def queues(at: Parting) -> Found:
    if "pop" in at.yours.op[0] and at.yours.returned != at.theirs.returned:
        mine, other = pair(at.yours.returned, at.theirs.returned)
        yield "queue", f"{at.call} hands out {mine}", f"the reference {other}"
    for key in ("waiting", "queue"):
        for what in (f"front of {key}", f"len of {key}"):
            a, b = at.seen(what)
            if a != b:
                yield "queue", f"{at.after} the {what} is {value(a)}", f"in the reference {value(b)}"
    for key in ("running", "waiting", "queue"):
        a, b = at.seen(key)
        if a == b or not (isinstance(a, list) and isinstance(b, list)):
            continue
        if sorted(map(str, a)) == sorted(map(str, b)):
            yield "queue", f"{at.after} {key} is {listing(a)} in this order", f"in the reference {listing(b)}"
        else:
            yield "queue", f"{at.after} {key} holds {listing(a)}", f"in the reference {listing(b)}"


def result(at: Parting) -> Found:
    """Report what the call returned, down to the entry that differs."""
    if at.yours.op[0] == "pick_victim" and at.yours.returned != at.theirs.returned:
        mine, other = pair(at.yours.returned, at.theirs.returned)
        yield "victim", f"{at.call} picks {mine}", f"the reference {other}"
    for path, *both in places(at.yours.returned, at.theirs.returned):
        where, (mine, other) = f" ({place(path)})" if path else "", pair(*both)
        yield "returned", f"{at.call} returns {mine}{where}", f"the reference {other}"


def books(at: Parting) -> Found:
    """Books that contradict themselves, as the check of a block manager found them."""
    wrong, right = at.seen("wrong in the books")
    if wrong != right and right == NOTHING:
        yield "memory", f"{at.after} your books contradict themselves: {wrong}", "the reference's agree"


def blocks(at: Parting) -> Found:
    """Free, held and cached blocks."""
    for key in ("num_free_blocks", "free blocks"):
        a, b = at.seen(key)
        if a != b:
            yield "memory", f"{at.after} {count(a, 'block')} are free", f"in the reference {value(b)}"
    for key in ("num_cached_blocks", "cached blocks"):
        a, b = at.seen(key)
        if a != b:
            yield "memory", f"{at.after} the cache holds {count(a, 'block')}", f"in the reference {value(b)}"
    for key in ("blocks held", "lengths"):
        for path, a, b in places(*at.seen(key)):
            yield (
                "memory",
                f"{at.after} {listing(path)} holds {count(a, 'block')}",
                f"in the reference {value(b)}",
            )
    for path, a, b in places(*at.seen("block tables (renamed)")):
        mine, other = pair(a, b)
        yield (
            "memory",
            f"{at.after} the blocks of {listing(path)} are {mine}, renamed",
            f"in the reference {other}",
        )


def calls(at: Parting) -> Found:
    """The calls that an engine's step makes."""
    mine, other = at.seen("calls in a step")
    for number, (a, b) in enumerate(zip_longest(mine or [], other or [], fillvalue=NOTHING)):
        if a != b:
            behind = f" after '{mine[number - 1]}'" if number else ""
            yield "calls", f"{at.call} calls {quoted(a)}{behind}", f"the reference calls {quoted(b)}"


def quoted(call: str) -> str:
    return call if call == NOTHING else f"'{call}'"


def state(at: Parting) -> Found:
    """Any other thing that can be seen after the call."""
    for path, *both in places(at.yours.observed, at.theirs.observed):
        where = f"a number of {place(path[:-1])}" if isinstance(both[0], float) else place(path)
        rule = next((rule for word, rule in KINDS.items() if word in where), "field")
        mine, other = pair(*both)
        yield rule, f"{at.after} {where} is {mine}", f"in the reference it is {other}"


def plainest(at: Parting) -> Found:
    for path, *both in places(comparable(at.yours), comparable(at.theirs)):
        mine, other = pair(*both)
        yield "field", f"In step {at.yours.step} {place(path)} is {mine}", f"in the reference it is {other}"
    yield "field", f"In step {at.yours.step} your run differs", "see the reference's beside it"


RULES: list[Callable[[Parting], Found]] = [
    raised, refused, changed, preempted, rows, queues, result, books, blocks, calls, state, plainest,
]  # fmt: skip
