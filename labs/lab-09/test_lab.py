"""lab-09's tests. LAB_IMPL chooses what they judge: solution (default), starter or engine."""

import re
from itertools import product

import pytest

from labs.kit import judge_random_scripts, load

scenarios = load("lab-09", "scenarios")
TOYS = scenarios.TOYS
PATTERNS = [  # over the letters a, b and c
    "abc", "a|b", "a(b|c)", "(a|ab)c", "(a|ab)(c|bc)", "a*", "a+b?", "(ab)*c", "(a|b)*abb", "(a|ab)*b",
    "((a*)*b?)*", "(aa|aaa)*", "a{2}", "a{1,3}b", "(ab){0,2}", "a{2,}", "[ab]c", "[^a]*", ".b.", "(|a)(b|)",
]  # fmt: skip
NOT_ASCII = [("é|€", "é€"), ("[à-ï]+", "àéa"), ("[^é]", "éèa"), (".€", "€é😀"), ("[€-😀]a?", "€😀a")]


def texts(letters, longest):
    return ["".join(text) for length in range(longest + 1) for text in product(letters, repeat=length)]


def played(lab, toy, *ops, eos=True):
    """The log of some operations; it is the run that is shown when a test fails."""
    return scenarios.run(lab, scenarios.scenario("of a test", toy, *ops, eos=eos))


def as_re_does(lab, how, pattern, letters, longest=4):
    """Ask the lab about each text; the differences from re.fullmatch, as a text each."""
    ops = [(how, pattern, text) for text in texts(letters, longest)]
    steps = played(lab, "letters", *ops).steps
    found = {step.op[2]: step.returned for step in steps}
    right = {text: re.fullmatch(pattern, text) is not None for text in found}
    return [
        f"{text!r}: {found[text]}, but re.fullmatch says {right[text]}"
        for text in found
        if found[text] != right[text]
    ]


def after(lab, toy, pattern, *written, eos=True):
    """Return the tokens that a request may write next after these."""
    log = played(lab, toy, *scenarios.writes(toy, pattern, *written), eos=eos)
    refused = [
        step.op[2] for step in log.steps if step.op[0] == "accept_tokens" and step.returned is not True
    ]
    assert not refused, f"behind a beginning of {list(written)} a token was refused: {refused[0]}"
    return log.steps[-1].observed["allowed next"]["a"]


def writing(lab, toy, pattern, *ops, eos=True):
    """Return the results of some operations of request a, and its state after the last one."""
    log = played(lab, toy, ("compile", pattern), ("start", "a"), *ops, eos=eos)
    last = log.steps[-1].observed
    return [step.returned for step in log.steps[2:]], {key: value["a"] for key, value in last.items()}


# ---------------------------------------------------------------------------------------- nullable


@pytest.mark.parametrize(
    "pattern", [*PATTERNS, "", "a||b", "(a*)+", "(a?){3}", "a*b*", "a*b", "ab*", "(a|b?)c*"]
)
def test_the_empty_text(lab, pattern):
    """Whether the empty text matches is what re.fullmatch says."""
    step = played(lab, "letters", ("nullable", pattern)).steps[0]
    assert step.returned == (re.fullmatch(pattern, "") is not None)


# -------------------------------------------------------------------------------------- derivative


@pytest.mark.parametrize("pattern", PATTERNS)
def test_one_derivative_a_byte(lab, pattern):
    """For all texts of up to four letters: the derivatives by its bytes end nullable if re matches it."""
    assert as_re_does(lab, "matches", pattern, "abc") == []


@pytest.mark.parametrize(("pattern", "letters"), NOT_ASCII)
def test_characters_of_several_bytes(lab, pattern, letters):
    """é is two bytes, € three, 😀 four: each byte is a step of its own, and no half is a text."""
    assert as_re_does(lab, "matches", pattern, letters, 2) == []
    halves = [scenarios.as_bytes(letter)[:-1] for letter in letters if len(letter.encode()) > 1]
    ops = [("matches", pattern, list(half)) for half in halves]
    assert not any(step.returned for step in played(lab, "letters", *ops).steps), "half a character matches"


def test_what_is_left_stays_small(lab):
    """Behind 200 bytes no more is left than behind two: the operators + and | simplify."""
    ops = [("left_after", pattern, "ab" * 100) for pattern in ("(a|ab)*(b|a)*", "((a|b)*a?b)*", "(a*b*)*")]
    assert [step.returned for step in played(lab, "letters", *ops).steps] == ["short"] * 3


# --------------------------------------------------------------------------------------- build_dfa


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_automaton_accepts_what_re_does(lab, pattern):
    """For all texts of up to four letters: the automaton ends in an accepting state if re matches it."""
    assert as_re_does(lab, "dfa_matches", pattern, "abc") == []


@pytest.mark.parametrize(("pattern", "letters"), NOT_ASCII)
def test_the_automaton_has_all_bytes(lab, pattern, letters):
    """Bytes above 127 have transitions too: texts of two characters beyond ASCII."""
    assert as_re_does(lab, "dfa_matches", pattern, letters, 2) == []


def test_equal_expressions_are_one_state(lab):
    """Long texts of (a|b)*abb lead round and round: a handful of states is enough for all of them."""
    steps = played(lab, "letters", ("dfa_matches", "(a|b)*abb", "abab" * 50 + "abb", 8)).steps
    assert steps[0].returned is True


def test_too_many_states_are_refused(lab):
    """(a|b)*a(a|b){8} needs 512 states: a limit of 64 or 511 is a ValueError, one of 512 an automaton."""
    pattern = "(a|b)*a(a|b){8}"
    assert played(lab, "letters", ("dfa_matches", pattern, "ba" * 5, 512)).steps[0].returned is True
    for limit in (64, 511):
        with pytest.raises(ValueError):
            played(lab, "letters", ("dfa_matches", pattern, "ba" * 5, limit))


# -------------------------------------------------------------------------------------------- walk


def test_all_bytes_of_a_token_must_fit(lab):
    """Behind a, of the pattern abb, the token ba fits with its first byte only, and is not allowed."""
    assert after(lab, "pieces", "abb", "a") == ["b"]
    assert after(lab, "pieces", "(ab|ba)c") == ["a", "b", "ab", "ba", "abc"]


def test_a_token_may_cross_from_one_part_to_the_next(lab):
    """In 19|20, -, 1-1 a token may hold the end of one part and the beginning of the next."""
    assert after(lab, "digits", "(19|20)-1") == ["1", "19", "2", "20"]
    assert after(lab, "digits", "(19|20)-1", "2") == ["0-"]
    assert after(lab, "digits", "1-1|1-2") == ["1", "1-1"]
    assert after(lab, "json", r'\{"name": "n"\}', '{"', "name") == ['": ', '"']


def test_it_goes_on_from_where_it_is(lab):
    """Each token is walked from the state behind those before it, not from the beginning."""
    assert after(lab, "letters", "abca") == ["a"]
    assert after(lab, "letters", "abca", "a", "b") == ["c"]
    assert after(lab, "letters", "abca", "a", "b", "c") == ["a"]


def test_half_a_character(lab):
    """A token may be half of é or a third of €: bytes are what counts, and each half can be written."""
    assert after(lab, "bytes", "é+") == [r"\xc3", "é"]
    returned, seen = writing(
        lab,
        "bytes",
        "(é|€)+",
        ("accept_tokens", "a", [1]),
        ("accept_tokens", "a", [2]),
        ("accept_tokens", "a", [4]),
    )
    assert returned == [True] * 3
    assert seen["allowed next"] == [r"\x82\xac"], "of € two bytes are left"


def test_a_token_without_bytes_is_never_allowed(lab):
    """A special token is no text: a model could write it for ever and come no further."""
    for pattern in ("a*", ".*", "(ab)*"):
        assert "" not in after(lab, "pieces", pattern)
    assert writing(lab, "pieces", "a*", ("accept_tokens", "a", [6]))[0] == [False]


def test_end_of_text_is_no_text(lab):
    """The token <end> does not stand for the characters <end>, though the pattern would have them."""
    assert after(lab, "letters", "[a<]?[^c]+") == ["a", "b"]
    assert after(lab, "letters", "[^c]+", "a") == ["a", "b", "end-of-text"]


# --------------------------------------------------------------------------------------- find_live


def test_no_way_into_a_trap(lab):
    """No token of this vocabulary has a digit: a branch that needs one is not entered."""
    assert after(lab, "no digits", r"a \d|b") == ["b"]
    assert after(lab, "no digits", r"(a|b)( \d| or)?", "a") == [" ", "end-of-text"]
    assert after(lab, "no digits", r"(a|b)( \d| or)?", "a", " ") == ["or"]


def test_going_on_for_ever_is_no_way_out(lab):
    """a can be repeated for ever in a*Z, and the end never comes: such a state is a trap as well."""
    assert after(lab, "letters", "b|a*Z") == ["b"]
    assert after(lab, "letters", "(c(ab)*Z|a)b?") == ["a"]


def test_a_trap_far_behind(lab):
    """The missing letter comes ten letters later: the first step already avoids it."""
    assert after(lab, "letters", "abcabcabcaZ|b") == ["b"]
    assert after(lab, "letters", "abcabcabcab|b") == ["a", "b"]


def test_the_end_may_be_far_away(lab):
    """All states of a long way are live, in whatever order they are numbered."""
    for pattern in ("abcabcabcabc", "(abc){4}", "c?b?a?abcabcabc"):
        assert after(lab, "letters", pattern, "a", "b") == ["c"]


def test_tokens_that_cannot_meet(lab):
    """Every letter occurs in a token, but no row of tokens spells the text: that is a trap, too."""
    log = played(lab, ["ab", "cb", "b", "a", "<end>"], ("compile", "ac|b"), ("start", "a"))
    assert log.steps[-1].observed["allowed next"]["a"] == ["b"]


def test_a_pattern_that_cannot_be_spelled_is_refused(lab):
    """If no text of the vocabulary matches, that is said before a model runs: ValueError."""
    for pattern in ("Z", r"\d+", "abZ", "a*Z"):
        with pytest.raises(ValueError):
            played(lab, "letters", ("compile", pattern))
    assert played(lab, "letters", ("compile", ""), ("compile", "Z?")).steps[-1].returned is None


# -------------------------------------------------------------------------------------------- mask


def test_end_of_text_only_where_the_text_is_whole(lab):
    """end-of-text is allowed in accepting states, also where more may follow, and nowhere else."""
    assert after(lab, "letters", "ab(c|)") == ["a"]
    assert after(lab, "letters", "ab(c|)", "a") == ["b"]
    assert after(lab, "letters", "ab(c|)", "a", "b") == ["c", "end-of-text"]
    assert after(lab, "letters", "ab(c|)", "a", "b", "c") == ["end-of-text"]


def test_the_empty_text_may_end_at_once(lab):
    """Where the empty text matches, end-of-text is allowed at the start."""
    assert after(lab, "letters", "(ab)*") == ["a", "end-of-text"]


def test_without_end_of_text(lab):
    """A model without end-of-text: a text that is whole ends by itself, where nothing may follow."""
    assert after(lab, "letters", "ab", "a", eos=False) == ["b"]
    returned, seen = writing(lab, "letters", "ab", ("accept_tokens", "a", [0, 1]), eos=False)
    assert (seen["allowed next"], seen["is_terminated"]) == ([], True)
    assert not writing(lab, "letters", "ab?", ("accept_tokens", "a", [0]), eos=False)[1]["is_terminated"]


def test_each_state_has_its_mask(lab):
    """Masks of other states, asked for earlier or in between, are not taken for this one's."""
    play = scenarios.Writers(lab, scenarios.scenario("", "letters")["config"])
    play.compile("abc")
    for name, count in (("a", 0), ("b", 1), ("c", 2), ("d", 0), ("e", 1)):
        play.start(name)
        for token in range(count):
            assert play.accept_tokens(name, [token]) is True
    masks = [play.allowed(play.writers[name]) for name in "abcdeabc"]
    assert masks == [[0], [1], [2], [0], [1], [0], [1], [2]]


def test_a_mask_is_worked_out_once(lab):
    """The second time a state is asked for its mask, by whichever request, no token is read."""
    steps = played(
        lab, "play", ("compile", "(O|o|love| )+[.!]"), ("start", "a"), ("reads_for_the_same_mask", "a"),
        ("start", "b"), ("accept_tokens", "b", [6]), ("reads_for_the_same_mask", "b"),
    ).steps  # fmt: skip
    assert (steps[2].returned, steps[5].returned) == (0, 0)


SPELLED = [
    ("pieces", "(ab|ba)*c?"), ("pieces", "a(ba)*|abc"), ("digits", "(19|20)-1"), ("digits", "1-19?|9*"),
    ("bytes", "(é|a€)*"), ("bytes", "[^a]"), ("no digits", r"(one|a|b)( (or|\d) (a|b))*"),
    ("letters", "(a|Z)*b|cZ"),
]  # fmt: skip


@pytest.mark.parametrize(("toy", "pattern"), SPELLED)
def test_exactly_the_texts_of_the_pattern(lab, toy, pattern):
    """A row of up to four tokens and end-of-text is accepted exactly if `re` matches its text."""
    tokens = [scenarios.as_bytes(token) for token in TOYS[toy][:-1]]
    rows = [row for length in range(5) for row in product(range(len(tokens)), repeat=length)]
    play = scenarios.Writers(lab, scenarios.scenario("", toy)["config"])
    play.compile(pattern)
    wrong = []
    for row in rows:
        text = b"".join(tokens[token] for token in row).decode("utf-8", "surrogateescape")
        right = re.fullmatch(pattern, text, re.ASCII) is not None and all(tokens[token] for token in row)
        right = right and text.isprintable()
        play.start("a")
        if play.accept_tokens("a", [*row, len(tokens)]) is not right:
            wrong.append(f"{[play.word(token) for token in row]}: {not right}, but re.fullmatch says {right}")
    assert wrong == []


WRITTEN = [
    ("digits", "1-19?|9*"), ("no digits", r"(one|a|b)( (or|\d) (a|b))*"), ("letters", "(a|Z)*b|cZ"),
    ("json", r'\{"name": ("(yes|no)"|true)\}'), ("play", r"(ROMEO|JULIET):\n(O|o|love|\.)+!"),
    ("pieces", "(ab)*c"),
]  # fmt: skip


@pytest.mark.parametrize(("toy", "pattern"), WRITTEN)
def test_whatever_is_sampled_can_be_finished(lab, toy, pattern):
    """A model that samples blindly among the allowed tokens writes a whole text of the pattern, always."""
    for first in range(0, 11, 4):  # an automaton takes longer than its texts
        ops = []
        for name, seed in zip("abcd", range(first, 11), strict=False):
            ops.append(("start", name))
            ops += [("accept_allowed", name, (seed * 7 + step * step) % 11) for step in range(12)]
        last = played(lab, toy, ("compile", pattern), *ops).steps[-1].observed
        for name, written in last["written"].items():
            text = written.removesuffix("end-of-text")
            if text != written:
                assert re.fullmatch(pattern, text, re.ASCII), written
            else:
                assert last["allowed next"][name], f"{text!r} is in a trap: nothing may follow, no end either"


# --------------------------------------------------------------------------------- accept_tokens


def test_accepting_goes_on(lab):
    """Several tokens at once are the same as one after the other."""
    one, seen_one = writing(lab, "pieces", "(ab)+c", ("accept_tokens", "a", [2]), ("accept_tokens", "a", [2]))
    both, seen_both = writing(lab, "pieces", "(ab)+c", ("accept_tokens", "a", [2, 2]))
    assert (one, both) == ([True, True], [True])
    assert seen_one == seen_both
    assert writing(lab, "pieces", "(ab)+c", ("accept_tokens", "a", []))[0] == [True]


def test_all_or_nothing(lab):
    """If one of several tokens is not allowed, none is accepted, also not those before it."""
    returned, seen = writing(
        lab, "letters", "abc", ("accept_tokens", "a", [0, 1, 1]), ("accept_tokens", "a", [2])
    )
    assert returned == [False, False]
    assert seen["allowed next"] == ["a"]
    returned, _ = writing(lab, "letters", "abc", ("accept_tokens", "a", [0]), ("accept_tokens", "a", [1, 0]))
    assert returned == [True, False]


def test_only_what_the_mask_allows_is_accepted(lab):
    """A token into a trap is refused, as is end-of-text where the text is not whole."""
    for tokens in ([0], [2, 3], [4, 1], [5]):
        assert writing(lab, "no digits", r"a \d|b|or", ("accept_tokens", "a", tokens))[0] == [False], tokens


def test_nothing_follows_the_end(lab):
    """Behind end-of-text nothing is allowed and nothing accepted, not even end-of-text."""
    returned, seen = writing(
        lab,
        "letters",
        "a*",
        ("accept_tokens", "a", [0, 3]),
        ("accept_tokens", "a", [0]),
        ("accept_tokens", "a", [3]),
    )
    assert returned == [True, False, False]
    assert (seen["allowed next"], seen["is_terminated"]) == ([], True)
    assert writing(lab, "letters", "a*", ("accept_tokens", "a", [0, 3, 0]))[0] == [False]


def test_requests_do_not_disturb_each_other(lab):
    """Two requests share an index, and each has a place of its own."""
    log = scenarios.run(lab, scenarios.NAMED["two requests share an index"])
    assert log.steps[-1].observed["allowed next"] == {"a": [":"], "b": [":"]}


# -------------------------------------------------------------------------------------- rollback


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rollback_takes_back_so_many_tokens(lab, count):
    """Behind a rollback of n tokens the request is where it was n tokens earlier, whatever their lengths."""
    tokens = [2, 2, 2, 4]
    _, seen = writing(lab, "pieces", "(ab){3}abc", ("accept_tokens", "a", tokens), ("rollback", "a", count))
    _, short = writing(lab, "pieces", "(ab){3}abc", ("accept_tokens", "a", tokens[: len(tokens) - count]))
    assert seen == short


def test_rollback_of_nothing(lab):
    """rollback(0) takes back no token."""
    _, seen = writing(lab, "letters", "abc", ("accept_tokens", "a", [0, 1]), ("rollback", "a", 0))
    assert seen["allowed next"] == ["c"]


def test_rollback_to_the_beginning(lab):
    """All tokens can be taken back, and others accepted in their place."""
    returned, seen = writing(
        lab,
        "letters",
        "ab|c",
        ("accept_tokens", "a", [0, 1]),
        ("rollback", "a", 2),
        ("accept_tokens", "a", [2]),
    )
    assert returned[-1] is True
    assert seen["allowed next"] == ["end-of-text"]


def test_rollback_over_the_end(lab):
    """A rollback over end-of-text opens the text again."""
    _, seen = writing(lab, "letters", "a*", ("accept_tokens", "a", [0, 0, 3]), ("rollback", "a", 1))
    assert (seen["allowed next"], seen["is_terminated"]) == (["a", "end-of-text"], False)
    _, seen = writing(lab, "letters", "ab", ("accept_tokens", "a", [0, 1, 3]), ("rollback", "a", 2))
    assert seen["allowed next"] == ["b"]


@pytest.mark.parametrize("count", [-1, 3, 100])
def test_rollback_of_more_than_there_is(lab, count):
    """More tokens than were accepted, or fewer than none: ValueError, and nothing has changed."""
    play = scenarios.Writers(lab, scenarios.scenario("", "letters")["config"])
    play.compile("abc")
    play.start("a")
    assert play.accept_tokens("a", [0, 1]) is True
    with pytest.raises(ValueError):
        play.writers["a"].rollback(count)
    assert play.seen()["allowed next"]["a"] == ["c"]


# ------------------------------------------------------------------------------- validate_tokens


def test_the_longest_beginning_is_valid(lab):
    """The valid tokens of a proposal are those before the first that would be refused."""
    ops = [
        ("validate_tokens", "a", tokens) for tokens in ([0, 1, 2], [0, 1, 1, 2], [1, 0], [], [0, 1, 2, 3, 0])
    ]
    assert writing(lab, "letters", "abc", *ops)[0] == [[0, 1, 2], [0, 1], [], [], [0, 1, 2, 3]]
    ops = [("accept_tokens", "a", [2]), ("validate_tokens", "a", [2, 5, 7, 7])]
    assert writing(lab, "pieces", "(ab)+c", *ops)[0] == [True, [2, 5, 7]]


def test_validating_changes_nothing(lab):
    """A proposal is only looked at: the request stays where it is, and its end is not reached."""
    for tokens in ([2], [0, 1], [2, 3]):
        _, seen = writing(
            lab, "letters", "abc?", ("accept_tokens", "a", [0, 1]), ("validate_tokens", "a", tokens)
        )
        assert (seen["allowed next"], seen["is_terminated"]) == (["c", "end-of-text"], False), tokens
    proposal = [2, 3, 0]
    play = scenarios.Writers(lab, scenarios.scenario("", "letters")["config"])
    play.compile("c")
    play.start("a")
    valid = play.writers["a"].validate_tokens(proposal)
    assert (valid, proposal) == ([2, 3], [2, 3, 0])
    assert valid is not proposal, "the answer is a list of its own"


# ----------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS, ids=lambda s: s["name"])
def test_every_request_stays_in_its_pattern(lab, scenario):
    """In every scenario a request that has not ended may go on; what is refused leaves it where it was."""
    log = scenarios.run(lab, scenario)
    for before, step in zip(log.steps, log.steps[1:], strict=False):
        if step.returned is False:
            assert step.observed == before.observed
        for name, allowed in step.observed["allowed next"].items():
            text = step.observed["written"][name]
            whole = text in ("ab", "ac") if scenario["name"] == "no end-of-text" else "end-of-text" in text
            assert bool(allowed) != whole, f"what may follow {text!r}: {allowed}"


def test_random_scripts(lab):
    """Drawn patterns, vocabularies and calls: each answer is that of a search through all texts."""
    judge_random_scripts("lab-09", lab)
