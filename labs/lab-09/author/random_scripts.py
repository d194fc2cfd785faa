"""Random scripts: random patterns on random vocabularies, and requests that accept, propose and roll back."""

from labs.kit import load

SCRIPTS = 60
Play = load("lab-09", "scenarios").Writers
# Letters of a script, and bytes of half a character; few, so that tokens overlap and branches die.
WORLDS = [
    ("ab", []), ("abc", []), ("a-1", []), ("aé", [[0xC3], [0xA9]]), ("b€", [[0xE2], [0x82], [0x82, 0xAC]]),
]  # fmt: skip
# Patterns that random ones rarely are; {0} and {1} are the letters of the world.
KNOWN = [
    "({0}|{0}{1})({1}|{0})*", "({0}*)*{1}?", "{0}*{1}", "({0}{1})+{0}?", "{0}?{1}?{0}", "({0}|{1}){{2}}",
    "{0}({1}{0}|Z)*", "({0}Z|{1})+", "{0}{{2,4}}{1}", "({0}{1}|{1}{0}{1})?", "[^{0}]{1}?", "({0}|)({1}|)",
    "({0}{0}|{0}{0}{0})*", "{0}|{0}Z|{0}{1}{0}{1}{0}{1}", "({0}{1}Z*)*", "{0}+|{1}+",
    "({0}|{1})*{0}({0}|{1})({0}|{1})", "{1}{0}*Z|{1}", "{0}{0}{0}{0}{1}", "({0}?{1})*",
]  # fmt: skip
MANY = "(a|b)*a(a|b){8}"  # 512 states


def pattern_of(rng, letters, depth=2):
    """A pattern over some letters, and at times Z, which no token has."""
    kind = rng.choice(["text", "text", "or", "repeat", "class", "join"]) if depth else "text"
    inner = [pattern_of(rng, letters, depth - 1) for _ in range(2)] if depth else []
    if kind == "or":
        return f"({'|'.join(inner)})"
    if kind == "repeat":
        return f"({inner[0]}){rng.choice(['*', '*', '+', '?', '{2}', '{1,3}'])}"
    if kind == "class":
        return rng.choice([f"[{''.join(letters)}]", ".", f"[^{letters[0]}]", f"[{letters[0]}]"])
    if kind == "join":
        return "".join(inner)
    return "".join(rng.choice([*letters * 4, "Z"]) for _ in range(rng.choice((1, 1, 2, 3))))


def draw(rng):
    letters, halves = rng.choice(WORLDS)
    letters = list(letters)

    def text(most):
        return "".join(rng.choice(letters) for _ in range(rng.randint(1, most)))

    tokens = rng.sample(letters, rng.choice((1, 2, len(letters))))
    tokens += rng.sample(halves, rng.randint(0, len(halves)))
    tokens += [text(3) for _ in range(rng.randint(1, 5))] + [""] * rng.randint(0, 1)
    rng.shuffle(tokens)
    eos = rng.choice((None, len(tokens), len(tokens), rng.randint(0, len(tokens))))
    if eos is not None:  # its bytes may be a text that the pattern knows, and mean something else
        tokens.insert(eos, rng.choice(("<end>", "", text(1))))
    patterns = [
        rng.choice(KNOWN).format(*letters) if rng.random() < 0.6 else pattern_of(rng, letters)
        for _ in range(2)
    ]
    calls = [["nullable", rng.choice(patterns)]]
    for _ in range(6):
        kind, pattern = rng.choice(("matches", "dfa_matches")), rng.choice(patterns)
        calls.append([kind, pattern, text(rng.choice((2, 3, 6)))])
    if rng.random() < 0.15:
        calls.append(["left_after", rng.choice(("(a|ab)*(b|a)*", "((a|b)*a)*", "(a*b*)*")), "ab" * 40])
    if rng.random() < 0.15:
        calls.append(["dfa_matches", MANY, text(4), rng.choice((64, 64, 511))])
    for pattern in patterns:
        calls += [["compile", pattern], ["start", "a"], ["start", "b"]]
        calls += [move(rng, len(tokens)) for _ in range(rng.randint(8, 20))]
    return {"config": {"vocabulary": tokens, "eos_token_id": eos}, "calls": calls}


def move(rng, num_tokens):
    """One call of a request; most of them accept what is allowed."""
    name, kind = rng.choice("aab"), rng.random()
    several = [rng.randrange(num_tokens) for _ in range(rng.choice((0, 1, 2, 2, 3)))]
    if kind < 0.5:
        return ["accept_allowed", name, rng.randint(0, 9)]
    if kind < 0.62:
        return ["accept_tokens", name, several]
    if kind < 0.7:
        return ["validate_tokens", name, several]
    if kind < 0.78:
        return ["propose", name, [rng.randint(0, 9) for _ in range(rng.randint(1, 4))]]
    if kind < 0.94:
        return ["rollback", name, rng.choice((0, 1, 1, 1, 2, 2, 3, 5, -1))]
    return ["reads_for_the_same_mask", name]
