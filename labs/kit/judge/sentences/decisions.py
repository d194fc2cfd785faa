"""Sentences on the decisions of a call: victims, rows and queues, in the logs of labs 01 and 03."""

from typing import Any

from labs.kit.judge.sentences.calls import STEPS, Found, Parting, is_schedule
from labs.kit.judge.sentences.words import count, listing, pair, value


def preempted(at: Parting) -> Found:
    """The victims of a step, by the counters that went up."""
    yours, theirs = (victims(at, step.observed) for step in (at.yours, at.theirs))
    if at.yours.op[0] in STEPS and sorted(yours) != sorted(theirs):
        rule = "victim" if len(yours) == len(theirs) else "preemption"
        step = f"Your step {at.yours.step} preempts {listing(yours)}"
        yield rule, step, f"the reference preempts {listing(theirs)}"


def victims(at: Parting, observed: dict[str, Any]) -> list[str]:
    were = preemptions(at.before)
    return [name for name, times in preemptions(observed).items() if times > were.get(name, 0)]


def preemptions(observed: dict[str, Any]) -> Any:
    """Return how often each request was preempted, as far as it can be seen."""
    end = ".num_preemptions"
    own = {key.removesuffix(end): times for key, times in observed.items() if key.endswith(end)}
    return own or observed.get("num_preemptions", {})


def rows(at: Parting) -> Found:
    """A schedule: the rows [id, tokens] of labs 01 and 03."""
    a, b = at.yours.returned, at.theirs.returned
    if at.yours.op[0] not in STEPS or a == b or not (is_schedule(a) and is_schedule(b)):
        return
    yours, theirs, ran = dict(a), dict(b), at.before.get("running", [])
    step = f"Your step {at.yours.step}"
    for name in dict.fromkeys([*theirs, *yours]):
        mine, other = yours.get(name), theirs.get(name)
        if mine == other:
            continue
        gives = f"gives {name} {count(mine, 'token')}"
        should = f"the reference gives it {count(other, 'token')}"
        if other is None and name not in ran:
            does_not = f"the reference does not{why_not(at, name, theirs, mine)}"
            yield "admission", f"{step} admits {name} and {gives.replace(name, 'it')}", does_not
        elif mine is None and name not in ran:
            yield "admission", f"{step} does not admit {name}", f"the reference does, and gives it {other}"
        elif other is None:
            yield "row", f"{step} {gives}", "the reference leaves it out"
        elif mine is None:
            yield "row", f"{step} leaves {name} out", should
        else:
            budget, _ = limits(at)
            left, left_there = budget - spent(yours, name), budget - spent(theirs, name)
            if budget and mine > left:
                said = f"{step} {gives}, and {max(0, left)} of the budget of {budget} are left"
                yield "budget", said, should
            more = f", all that is left of the budget of {budget}" if budget and other == left_there else ""
            yield "chunk", f"{step} {gives}", f"{should}{more}"
    yield "row order", f"{step} serves {listing(yours)} in this order", f"the reference {listing(theirs)}"


def spent(scheduled: dict[str, int], name: str) -> int:
    """Return how many tokens the rows before this request's get."""
    return sum(list(scheduled.values())[: list(scheduled).index(name)])


def limits(at: Parting) -> tuple[int, int]:
    """Return the budget and the slots of a step; 0 where they are not known."""
    own = at.yours.op[1:3]
    keys = ("max_num_batched_tokens", "max_num_seqs")
    budget, slots = own if len(own) == 2 else [at.config.get(key, 0) for key in keys]
    return budget, slots


def why_not(at: Parting, name: str, scheduled: dict[str, int], mine: Any) -> str:
    """Say why the reference does not admit a request."""
    running, waiting, free = map(at.theirs.observed.get, ("running", "waiting", "num_free_blocks"))
    budget, slots = limits(at)
    if victims(at, at.theirs.observed):
        return ": it has preempted in this step"
    if budget and sum(scheduled.values()) >= budget:
        return f": its budget of {budget} is used up"
    if slots and running and len(running) >= slots:
        return f": {count(len(running), 'request')} run, and at most {slots} may"
    if waiting and name in waiting[1:]:
        return f": {waiting[0]} stands before it in the queue"
    block_size = at.config.get("block_size", 1)
    short = isinstance(free, int) and isinstance(mine, int) and free * block_size < mine
    return f", with {count(free, 'free block')}" if short else ""


def queues(at: Parting) -> Found:
    if "pop" in at.yours.op[0] and at.yours.returned != at.theirs.returned:
        mine, other = pair(at.yours.returned, at.theirs.returned)
        yield "queue", f"{at.call} hands out {mine}", f"the reference {other}"
    for what in ("front of waiting", "len of waiting", "front of queue", "len of queue"):
        a, b = at.seen(what)
        if a != b:
            yield "queue", f"{at.after} the {what} is {front(a)}", f"in the reference {front(b)}"
    for key in ("running", "waiting", "queue"):
        a, b = at.seen(key)
        if a == b or not (isinstance(a, list) and isinstance(b, list)):
            continue
        alike = sorted(map(str, a)) == sorted(map(str, b))
        holds = f"is {listing(a)} in this order" if alike else f"holds {listing(a)}"
        yield "queue", f"{at.after} {key} {holds}", f"in the reference {listing(b)}"


def front(seen: Any) -> str:
    """Name the request at the front, which was seen in a list of its own."""
    return listing(seen) if isinstance(seen, list) else value(seen)
