"""Sentences on masks: which tokens a request may write next, as lab-09 has it."""

from labs.kit.judge.sentences.calls import Found, Parting

SEEN = "allowed next"  # the key under which a log has the tokens of each request


def masks(at: Parting) -> Found:
    """Report a token that one of the two masks allows after the call, and the other does not."""
    mine, theirs = (seen or {} for seen in at.seen(SEEN))
    for name, right in theirs.items():
        if isinstance(mine.get(name), list):
            if more := [token for token in mine[name] if token not in right]:
                what = shown(more)
                yield "mask", f"{at.after} {name} may write {what}", f"the reference's may not write {what}"
            if fewer := [token for token in right if token not in mine[name]]:
                what = shown(fewer)
                yield "mask", f"{at.after} {name} may not write {what}", f"the reference's may write {what}"


def shown(tokens: list[str]) -> str:
    """Return up to three tokens, quoted where they are texts."""
    said = [token if token == "end-of-text" else repr(token) for token in tokens]
    return " or ".join(said[:3]) + (f" ({len(said)} tokens)" if len(said) > 3 else "")
