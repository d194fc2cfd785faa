"""Sentences on rows of logits, on draws and on masks: labs 08 and 09."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from labs.kit.judge.compare import same
from labs.kit.judge.sentences.calls import Found, Parting
from labs.kit.judge.sentences.words import count, value

OUT = "out"  # a token that was dropped


def masks(at: Parting) -> Found:
    """Report a token that one of the two masks allows after the call, and the other does not."""
    mine, theirs = (seen or {} for seen in at.seen("allowed next"))
    for name, right in theirs.items():
        if isinstance(own := mine.get(name), list):
            if more := shown([token for token in own if token not in right]):
                yield "mask", f"{at.after} {name} may write {more}", f"the reference's may not write {more}"
            if fewer := shown([token for token in right if token not in own]):
                yield "mask", f"{at.after} {name} may not write {fewer}", f"the reference's may write {fewer}"


def shown(tokens: list[str]) -> str:
    """Return up to three tokens, quoted where they are texts."""
    said = [token if token == "end-of-text" else repr(token) for token in tokens]
    return " or ".join(said[:3]) + (f" ({len(said)} tokens)" if len(said) > 3 else "")


def sampled(at: Parting) -> Found:
    """Yield the sentence on the first token that differs, whose facts follow from the call's arguments."""
    name, *given = at.yours.op
    mine, right = at.yours.returned, at.theirs.returned
    call = f"In step {at.number} your"
    if name == "draw" and isinstance(mine, int) and mine != right:
        gets = f"{call} draw gets token {mine} with the number {value(given[1])}"
        yield "drawn", gets, stretch(given[0], right)
    elif name == "uniform" and isinstance(mine, float) and mine != right:
        gives = f"{call} uniform gives {value(mine)} for output {given[1]} of {given[0]}"
        yield "numbers", gives, f"the reference gives {value(right)}"
    elif name in ("step", "failed_step") and isinstance(mine, dict) and "requests" in at.theirs.observed:
        for row in (one for one in right if mine.get(one) != right[one]):
            request = at.theirs.observed["requests"][row]
            should = f"the reference gives it token {right[row]} ({request})"
            yield "drawn", f"{call} Sampler gives row {row} token {value(mine.get(row))}", should
    elif name == "batch_probabilities" and isinstance(mine, dict):
        for row in right:
            settings = at.theirs.observed["requests"][row].partition(";")[0]
            where = f" of row {row} ({settings})"
            yield from tokens(f"{call} {name} ", name, mine.get(row), right[row], given, where)
    elif name.startswith("apply_") or name == "probabilities":
        where = f" under {value(given[1])}" if name == "probabilities" and given[1] else ""
        yield from tokens(f"{call} {name} ", name, mine, right, given, where)


def tokens(call: str, name: str, mine: Any, right: Any, given: Sequence[Any], where: str = "") -> Found:
    """Yield what a row's tokens get and should get: out or not, a logit, a probability."""
    if not (isinstance(mine, dict) and isinstance(right, dict)):
        return
    differ = [token for token in right if token in mine and not same(mine[token], right[token])]
    for token in differ:
        a, b = mine[token], right[token]
        if name.endswith("probabilities"):
            had = f"{call}gives {token}{where} a probability of {value(a)}"
            yield "probability", had, f"the reference gives it {value(b)}"
            continue
        why = reason(name, given, int(token.split()[1]))
        if OUT in (a, b):
            does, should = ("drops", "keeps") if a == OUT else ("keeps", "drops")
            yield "limit", f"{call}{does} {token}", f"the reference {should} it{why}"
        else:
            yield "logit", f"{call}makes the logit of {token} {number(a)}", f"the reference {number(b)}{why}"


def number(logit: float) -> str:
    """Return a logit in digits, as long as a reader can read them."""
    if abs(logit) < 1e4 or math.isnan(logit):
        return value(logit)
    return f"{logit:.0f}" if abs(logit) < 1e15 else "infinite, or nearly"


def reason(name: str, given: Sequence[Any], token_id: int) -> str:
    """Return what the setting of a call says of a token, worked out from the row that was given."""
    row = [-math.inf if logit == OUT else float(logit) for logit in given[0]]
    own = row[token_id]
    if name == "apply_penalties":
        times = [count(ids.count(token_id), "time") for ids in given[1:3]]
        return f": the token is {times[0]} in the prompt and {times[1]} in the outputs"
    if name == "apply_temperature":
        return f": the temperature is {value(given[1])}"
    setting = f"{name.removeprefix('apply_')} is {value(given[1])}"
    if name == "apply_top_k":
        return f": {count(sum(other > own for other in row), 'larger logit')}, and {setting}"
    if name == "apply_min_p":
        return f": it has {value(math.exp(own - max(row)))} of the best token's probability, and {setting}"
    shares = [math.exp(logit - max(row)) for logit in row]
    before = sum(s for i, s in enumerate(shares) if (-row[i], i) < (-own, token_id)) / sum(shares)
    return f": the better tokens have {value(before)} of the probability, and {setting}"


def stretch(probs: Sequence[float], token_id: int) -> str:
    ends = [sum(probs[:i]) / sum(probs) for i in range(len(probs) + 1)]
    start, end = list(pairwise(ends))[token_id]
    return f"the reference gets token {token_id}, whose stretch is from {value(start)} to {value(end)}"
