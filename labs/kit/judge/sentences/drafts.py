"""Sentences on drafts: lab-10's proposals, the rows that are asked for, and chance that is counted out."""

from typing import Any

from labs.kit.judge.sentences.calls import Found, Parting
from labs.kit.judge.sentences.words import NOTHING, count, listing, value

ASKED = "rows asked for (id, row, output index)"
COMPUTED = "tokens the draft model computed"


def proposals(at: Parting) -> Found:
    """Differences in the tokens that are proposed, and in those that the draft model computes for them."""
    mine, other = at.yours.returned, at.theirs.returned
    if at.yours.op[0] != "propose":
        return
    if mine != other and isinstance(mine, list) and isinstance(other, list):
        yield "proposal", f"{at.call} proposes {listing(mine)}", f"the reference proposes {listing(other)}"
    a, b = at.seen(COMPUTED)
    if a != b and isinstance(a, list) and isinstance(b, list):
        computes = f"{at.call} has the draft model compute {listing(a)}"
        yield "draft cache", computes, f"the reference has the draft model compute {listing(b)}"


def drafts(at: Parting) -> Found:
    """The drafts of a step, as they are scheduled."""
    mine, other = at.yours.returned, at.theirs.returned
    if at.yours.op[0] != "step" or not (is_step(mine) and is_step(other)):
        return
    for name in dict.fromkeys([*other["drafts"], *mine["drafts"]]):
        a, b = mine["drafts"].get(name, []), other["drafts"].get(name, [])
        if a != b:
            keeps = f"Your step {at.yours.step} computes {drafts_of(a)} of {name}"
            yield "drafts", keeps, f"the reference computes {drafts_of(b)} of {name}"


def drafts_of(tokens: list[Any]) -> str:
    return f"{count(len(tokens), 'draft')} ({listing(tokens)})" if tokens else "no draft"


def is_step(returned: Any) -> bool:
    return isinstance(returned, dict) and {"scheduled", "drafts", "sampled"} <= {*returned}


def rows(at: Parting) -> Found:
    """The rows that are sampled, each as which output; then the tokens that are kept."""
    mine, other = (rows or [] for rows in at.seen(ASKED))
    a, b = (next((row for row in one if row not in two), None) for one, two in ((mine, other), (other, mine)))
    if a and b:
        yield "verify", f"{at.call} asks for {asked(a)}", f"the reference asks for {asked(b)}"
    elif len(mine) != len(other):
        asks, wanted = count(len(mine), "row"), count(len(other), "row")
        yield "verify", f"{at.call} asks for {asks}", f"the reference asks for {wanted}"
    mine, other = at.yours.returned, at.theirs.returned
    said = mine["sampled"] if is_step(mine) else {"": mine} if at.yours.op[0] == "verify" else {}
    should = other["sampled"] if is_step(other) else {"": other}
    for name in said:
        a, b = said[name], should.get(name, NOTHING)
        if a != b and isinstance(a, list) and isinstance(b, list):
            whose = f" of {name}" if name else ""
            yield "verify", f"{at.call} keeps {listing(a)}{whose}", f"the reference keeps {listing(b)}{whose}"


def asked(row: list[Any]) -> str:
    return f"row {row[1]} as output {row[2]} of {row[0]}"


def accepted(at: Parting) -> Found:
    """How many drafts count as accepted, in all steps so far."""
    mine, other = at.seen("accepted drafts")
    for name in dict.fromkeys([*(other or {}), *(mine or {})]):
        a, b = (mine or {}).get(name, 0), (other or {}).get(name, 0)
        if a != b:
            are = f"{at.after} {count(a, 'draft')} of {name} count as accepted"
            yield "accepted", are, f"in the reference {b}"


def chance(at: Parting) -> Found:
    """All that may come of sampled drafts, with probabilities."""
    mine, other = at.yours.returned, at.theirs.returned
    if at.yours.op[0] != "rejection_sample" or not (isinstance(mine, dict) and isinstance(other, dict)):
        return
    for tokens in dict.fromkeys([*other, *mine]):
        a, b = mine.get(tokens, "0"), other.get(tokens, "0")
        if a != b:
            yields = f"yields {value(tokens)} with probability"
            yield "chance", f"{at.call} {yields} {a}", f"the reference {yields} {b}"


RULES = [proposals, drafts, rows, accepted, chance]
