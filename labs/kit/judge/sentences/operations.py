"""Sentences on logs of operations: labs 05, 06, 08, 09 and 11, and the random scripts of all labs.

A call's record says what it returned or raised, and the state that could be seen after it.
"""

from collections.abc import Callable
from itertools import zip_longest

from labs.kit.judge.sentences import drafts, sampling
from labs.kit.judge.sentences.calls import LONG, Found, Parting, call_of, gives, has_raised, plainest
from labs.kit.judge.sentences.decisions import preempted, queues, rows
from labs.kit.judge.sentences.fronts import fronts
from labs.kit.judge.sentences.memory import blocks, books, cached, named, published, requests
from labs.kit.judge.sentences.rules import Clauses
from labs.kit.judge.sentences.words import NOTHING, count, listing, pair, place, places
from labs.kit.toys.driver import OpLog

GRANTS = {
    "admit": "admits", "admit_again": "admits", "admit_all": "admits", "allocate": "finds room for",
    "accept_tokens": "accepts tokens of",
}  # fmt: skip
QUESTIONS = ("matches", "dfa_matches", "nullable")  # False is an answer, and refuses nothing
SEES = " sees"  # at the end of the key of a query
KINDS = {  # a word in the key of what was seen: the rule
    "Deltas": "text", "decoded": "text", "calls": "calls",
    "logits": "tensor", "keys": "tensor", "values": "tensor", "mask": "tensor",
    "past_lens": "tensor", "is_last": "tensor", "slot": "tensor", "inbox": "queue", "status": "finish",
    "finish": "finish", "token_ids": "tokens", "num_": "counter", "arrival": "queued", "priority": "queued",
    "written": "text", "terminated": "mask",
    "max_tokens": "counter", "computed": "counter", "cached": "cached", "tokens": "tensor",
    "positions": "tensor", "request": "counter",
}  # fmt: skip


def rule_for(where: str) -> str:
    """Return the rule for what was seen under such a key."""
    return next((rule for word, rule in KINDS.items() if word in where), "field")


def ended(yours: OpLog, reference: OpLog, index: int) -> Clauses:
    if index < len(yours.steps):
        call = call_of(yours.steps[index])
        return "end", f"Your run goes on with {call} in step {index}", "the reference's is over by then"
    step = reference.steps[index]
    how = f" with {yours.end.error}" if yours.end and yours.end.error else ""
    ends = f"Your run ends at {call_of(step)} in step {index}{how}"
    return "end", ends, f"the reference {gives(step)} there"


def raised(at: Parting) -> Found:
    if gives(at.yours) != gives(at.theirs) and (has_raised(at.yours) or has_raised(at.theirs)):
        should = gives(at.theirs)
        if len(should) > LONG and not has_raised(at.theirs):
            should = "returns without an error"
        yield "raised", f"{at.call} {gives(at.yours)}", f"the reference {should}"


def refused(at: Parting) -> Found:
    """A yes where there should be a no, or the other way round."""
    name, *arguments = at.yours.op
    refuses, should = at.yours.returned is False, at.theirs.returned is False
    if refuses == should or name in QUESTIONS:
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


def result(at: Parting) -> Found:
    """Report what the call returned, down to the entry that differs."""
    if at.yours.op[0] == "pick_victim" and at.yours.returned != at.theirs.returned:
        mine, other = pair(at.yours.returned, at.theirs.returned)
        yield "victim", f"{at.call} picks {mine}", f"the reference {other}"
    for path, *both in places(at.yours.returned, at.theirs.returned):
        where, (mine, other) = f" ({place(path)})" if path else "", pair(*both)
        yield "returned", f"{at.call} returns {mine}{where}", f"the reference {other}"


def calls(at: Parting) -> Found:
    """The calls that an engine's step makes."""
    mine, other = at.seen("calls in a step")
    for number, (a, b) in enumerate(zip_longest(mine or [], other or [], fillvalue=NOTHING)):
        if a != b:
            behind = f" after '{mine[number - 1]}'" if number else ""
            yield "calls", f"{at.call} calls {quoted(a)}{behind}", f"the reference calls {quoted(b)}"


def quoted(call: str) -> str:
    return call if call == NOTHING else f"'{call}'"


def batches(at: Parting) -> Found:
    """Differences in the calls of lab-04's model, and in the keys that a query may see (marked x)."""
    calls, _ = at.seen("calls of the model")  # seen where there are several
    if calls:
        yield "calls", f"{at.call} calls the model {count(calls, 'time')}", "the reference once"
    logits, _ = at.seen("rows of logits asked for")  # seen where there are too many
    if logits:
        rows = f"{at.call} asks for the logits of {count(logits, 'row')}"
        yield "tensor", rows, "the reference for those of the sampled rows alone"
    for (query, *_), mine, other in places(at.yours.observed, at.theirs.observed):
        if not (SEES in str(query) and isinstance(mine, str) and isinstance(other, str)):
            continue
        column = next((n for n, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), 0)
        if {*mine, *other} <= {"x", "."}:
            sees, does = ("sees", "it does not") if mine[column] == "x" else ("does not see", "it does")
            query = str(query).removesuffix(SEES)
            yield "tensor", f"{at.after} {query} {sees} key {column}", f"in the reference {does}"
        else:
            yield "tensor", f"{at.after} {query} {mine}", f"in the reference {other}"


def state(at: Parting) -> Found:
    """Any other thing that can be seen after the call."""
    for path, *both in places(at.yours.observed, at.theirs.observed):
        where = f"a number of {place(path[:-1])}" if all(isinstance(b, float) for b in both) else place(path)
        rule = rule_for(where)
        mine, other = pair(*both)
        yield rule, f"{at.after} {where} is {mine}", f"in the reference it is {other}"


RULES: list[Callable[[Parting], Found]] = [
    raised, fronts, refused, changed, *drafts.RULES, preempted, rows, queues, sampling.sampled, named, result,
    books, sampling.masks, blocks, published, cached, calls, batches, requests, state, plainest,
]  # fmt: skip
