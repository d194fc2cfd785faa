"""Sentences on clients of a server's front: what each has read and when, and which of them wait."""

from itertools import takewhile
from typing import Any

from labs.kit.judge.sentences.calls import Found, Parting
from labs.kit.judge.sentences.words import count, listing, value

SEEN = {"time", "read", "clients", "answers", "faults"}


def fronts(at: Parting) -> Found:
    """Report the first of: a broken rule of threads, what a client has read, how it stands, what it cost."""
    mine, theirs = at.yours.observed, at.theirs.observed
    if not (mine.keys() >= SEEN and theirs.keys() >= SEEN):
        return
    time = mine["time"]
    for fault in mine["faults"]:
        yield "thread", f"By {time} {fault.rstrip('.')}", "in the reference this does not happen"
    yield from forever(at, time)
    for name in theirs["read"]:
        yield from reading(name, mine, theirs, time)
    for key in ("clients", "answers"):
        for name, right in theirs[key].items():
            stands = mine[key].get(name, "waits")
            if stands != right:
                yield "client", f"At {time} {name} {state(stands)}", f"in the reference it {state(right)}"
    for name in dict.fromkeys([*theirs["tokens computed"], *mine["tokens computed"]]):
        a, b = (seen["tokens computed"].get(name, 0) for seen in (mine, theirs))
        if a != b:
            stands = state(mine["clients"].get(name, ""))
            cost = f"By {time} {count(a, 'token')} had been computed for {name}, which {stands}"
            yield "computed", cost, f"in the reference {b}"
    if mine["num_requests"] != theirs["num_requests"]:
        is_now = f"At {time} num_requests is {value(mine['num_requests'])}"
        yield "place", is_now, f"in the reference {value(theirs['num_requests'])}"


def forever(at: Parting, time: str) -> Found:
    """Report what is left when nothing is due any more."""
    mine, theirs = at.yours.returned, at.theirs.returned
    if not (at.yours.op[0] == "drain" and isinstance(mine, dict) and isinstance(theirs, dict)):
        return
    if names := mine["wait for ever"]:
        waits, one = "waits" if len(names) == 1 else "wait", names[0]
        right = at.theirs.observed["clients"].get(one) or at.theirs.observed["answers"].get(one, "")
        what = f"At {time} nothing is due any more, and {listing(names)} {waits} for ever"
        yield "client", what, f"in the reference {one} {state(right)}"
    if (kept := mine["left in the engine"]) != theirs["left in the engine"]:
        yield "computed", f"At the end the engine still has {listing(kept)}", "in the reference it has none"


def reading(name: str, mine: dict[str, Any], theirs: dict[str, Any], time: str) -> Found:
    """The first Delta at which what a client has read parts from what it should have."""
    a, b = mine["read"].get(name, []), theirs["read"][name]
    place = len([*takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))])
    has = f"At {time} {name} {state(mine['clients'].get(name, ''))}, and has read {count(place, 'Delta')}"
    if place < len(a):
        has = f"At {time} {name} has read {a[place]}"
    if place < max(len(a), len(b)):
        right = b[place] if place < len(b) else count(place, "Delta")
        yield "client", has, f"the reference's has read {right}"


def state(words: str) -> str:
    """Return how a client stands, as what it does."""
    what, _, when = words.partition(" at ")
    if what.endswith("Error"):
        return f"got {'an' if what[0] in 'AEIO' else 'a'} {what} at {when}"
    known = {"done": f"read its last Delta by {when}", "left": f"left at {when}"}
    if what in known or not when:
        return known.get(what, what or "has not come")
    return f"got the answer {what!r} at {when}"
