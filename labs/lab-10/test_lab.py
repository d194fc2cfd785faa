"""Tests of drafts: where they come from, how many are computed, which are kept, what the rest leaves."""

from fractions import Fraction

import pytest

from labs.kit import assert_drained, judge_random_scripts, load, make_request
from labs.kit.toys.speculation import (
    QuotingModel,
    ToyDraft,
    chooser,
    distribution,
    request_of,
    row_after,
    spec_loop,
    text_alone,
)
from mini_engine.block_manager import BlockManager
from mini_engine.request import SamplingParams

scenarios = load("lab-10", "scenarios")
SCENARIOS = {scenario["name"]: scenario for scenario in scenarios.SCENARIOS}


def request(prompt, outputs=(), max_tokens=64, name="r0", drafts=(), **sampling):
    """A request whose tokens are all computed but the last."""
    made = make_request(name, list(prompt), max_tokens=max_tokens)
    made.sampling_params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens} | sampling)
    made.output_token_ids = list(outputs)
    made.num_computed_tokens = made.num_tokens - 1
    made.spec_token_ids = list(drafts)
    return made


# ------------------------------------------------------------------------------------ prompt lookup


def lookup(lab, text, *, least=1, most=3, k=4):
    """Return the proposal for a text."""
    return list(lab.NgramProposer(least, most, k).propose(request(text)))


def test_what_followed_the_last_time(lab):
    """The text ends in 7 8, which stood at the beginning: what followed there is proposed."""
    assert lookup(lab, [7, 8, 1, 2, 3, 4, 5, 7, 8]) == [1, 2, 3, 4]


def test_the_end_itself_is_no_place(lab):
    """The end of the text stands at the end of the text, where nothing follows: that is no match."""
    assert lookup(lab, [1, 2, 3, 4]) == []
    assert lookup(lab, [5, 6, 5]) == [6, 5]


def test_the_latest_place_counts(lab):
    """7 8 stood there twice: what followed the second time is proposed."""
    assert lookup(lab, [7, 8, 1, 1, 7, 8, 2, 2, 9, 7, 8], k=2) == [2, 2]


def test_the_longest_end_counts(lab):
    """The last three tokens stood there, and later the last two: three say more than two."""
    assert lookup(lab, [6, 7, 8, 1, 1, 7, 8, 2, 2, 6, 7, 8], k=2) == [1, 1]


def test_an_end_is_no_longer_than_allowed(lab):
    """With prompt_lookup_max 2 the third token from the end does not matter."""
    assert lookup(lab, [6, 7, 8, 1, 1, 7, 8, 2, 2, 6, 7, 8], most=2, k=2) == [2, 2]


def test_an_end_is_no_shorter_than_allowed(lab):
    """With prompt_lookup_min 2 a single token that stood there before proposes nothing."""
    text = [8, 1, 2, 7, 8]
    assert lookup(lab, text) == [1, 2, 7, 8]
    assert lookup(lab, text, least=2) == []


def test_a_place_may_overlap_the_end(lab):
    """5 5 5 5 ends in 5 5 5, which stands one place earlier, too: one 5 follows it."""
    assert lookup(lab, [5, 5, 5, 5]) == [5]


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_no_more_than_asked_for(lab, k):
    """num_speculative_tokens is the most; the text may be over before that."""
    assert lookup(lab, [7, 1, 2, 3, 4, 5, 7], k=k) == [1, 2, 3, 4, 5, 7][:k]


def test_nothing_found_is_nothing(lab):
    """A text without a repetition, and a text of one token, propose nothing."""
    assert lookup(lab, [1]) == []
    assert lookup(lab, [1, 2], most=5) == []
    assert lookup(lab, range(50)) == []


def test_outputs_are_part_of_the_text(lab):
    """The last tokens are also found among the outputs, or across the end of the prompt."""
    proposer = lab.NgramProposer(1, 3, 2)
    assert list(proposer.propose(request([1, 2], [3, 4, 1, 2]))) == [3, 4]
    grown = request([1], [2, 9, 2])
    assert list(proposer.propose(grown)) == [9, 2]
    grown.output_token_ids += [9, 3, 2, 9]
    assert list(proposer.propose(grown)) == [3, 2]


def test_proposing_changes_nothing(lab):
    """The request is as it was, and what is done to the drafts does not change it."""
    proposer, made = lab.NgramProposer(1, 3, 4), request([7, 1, 2], [7, 3, 7])
    before = [*made.prompt_token_ids], [*made.output_token_ids], made.num_computed_tokens
    drafts = proposer.propose(made)
    assert list(drafts) == [3, 7]
    drafts.clear()
    assert ([*made.prompt_token_ids], [*made.output_token_ids], made.num_computed_tokens) == before
    assert list(proposer.propose(made)) == [3, 7]


# ------------------------------------------------------------------------------------ a draft model


def says(text, k):
    """Return the draft model's tokens after a text, computed with a correct cache."""
    toy, said, text = ToyDraft(), [], list(text)
    for _ in range(k):
        said.append(toy.forward(toy.new_cache(), text + said))
    return said


def test_drafts_are_what_the_draft_model_says(lab):
    """Four drafts behind a text, each after the text and the drafts before it."""
    proposer = lab.DraftModelProposer(ToyDraft(), 4)
    assert list(proposer.propose(request([1, 2, 3], [4]))) == says([1, 2, 3, 4], 4)


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_rejected_drafts_leave_the_cache(lab, kept):
    """Some drafts are kept, and another token follows: the next drafts come from the text as it is now."""
    proposer, made = lab.DraftModelProposer(ToyDraft(), 4), request([1, 2, 3], [4])
    for _ in range(5):
        drafts = list(proposer.propose(made))
        assert drafts == says(made.token_ids(), 4), f"after {len(made.output_token_ids)} outputs"
        made.output_token_ids += [*drafts[:kept], (drafts[kept] + 1) % 12]


def test_the_text_may_grow_without_drafts(lab):
    """A step passes without proposals: behind the rejected draft stand tokens that it was not asked about."""
    proposer, made = lab.DraftModelProposer(ToyDraft(), 4), request([1, 2, 3], [4])
    for _ in range(5):
        drafts = list(proposer.propose(made))
        assert drafts == says(made.token_ids(), 4)
        made.output_token_ids += [(drafts[0] + 1) % 12, drafts[1], 7]


def test_all_drafts_kept_and_a_token_more(lab):
    """The last draft was never computed: it is computed in the next step, with the token behind it."""
    toy = ToyDraft()
    proposer, made = lab.DraftModelProposer(toy, 3), request([1, 2, 3], [4])
    for _ in range(4):
        drafts = list(proposer.propose(made))
        assert drafts == says(made.token_ids(), 3)
        made.output_token_ids += [*drafts, 5]


def test_nothing_is_computed_twice(lab):
    """The text is computed once, then what is new; of the drafts those that are kept are not again."""
    toy = ToyDraft()
    proposer, made = lab.DraftModelProposer(toy, 3), request([1, 2, 3], [4])
    drafts = list(proposer.propose(made))
    assert sum(toy.passes, []) == [1, 2, 3, 4, *drafts[:2]]
    toy.passes.clear()
    other = (drafts[1] + 1) % 12
    made.output_token_ids += [drafts[0], other]
    again = list(proposer.propose(made))
    assert sum(toy.passes, []) == [other, *again[:2]]


def test_asked_again_it_says_the_same(lab):
    """A text that has not grown has its last token computed again: its row says what follows."""
    proposer, made = lab.DraftModelProposer(ToyDraft(), 3), request([1, 2, 3], [4])
    first = list(proposer.propose(made))
    assert [list(proposer.propose(made)) for _ in range(2)] == [first, first]


def test_each_request_has_its_cache(lab):
    """Two requests in turn: neither's drafts depend on the other, and neither is computed twice."""
    toy = ToyDraft()
    proposer, a, b = (
        lab.DraftModelProposer(toy, 2),
        request([1, 2], [3], name="a"),
        request([9, 8], [7], name="b"),
    )
    for _ in range(3):
        for made in (a, b):
            drafts = list(proposer.propose(made))
            assert drafts == says(made.token_ids(), 2)
            made.output_token_ids.append(drafts[0])
    assert len(sum(toy.passes, [])) == 2 * (3 + 1 + 2 * 2)


def test_no_drafts_wanted(lab):
    """With num_speculative_tokens 0 nothing is proposed."""
    assert list(lab.DraftModelProposer(ToyDraft(), 0).propose(request([1, 2], [3]))) == []


# ------------------------------------------------------------------------------------ room for drafts


def room(lab, *requests, blocks=64, size=1, budget=16, rows=None):
    """Schedule the drafts of decodes that hold room for their known tokens; (scheduled, drafts that stay)."""
    kv = BlockManager(blocks, size, watermark=0)
    for made in requests:
        computed = made.num_computed_tokens
        assert kv.admit(made)
        made.num_computed_tokens = computed
    scheduled = {made.request_id: 1 for made in requests} if rows is None else dict(rows)
    lab.schedule_drafts(list(requests), scheduled, kv, budget)
    kv.check()
    return scheduled, [list(made.spec_token_ids) for made in requests]


def test_drafts_are_computed_behind_the_last_token(lab):
    """A decode with three drafts and room for all computes four tokens."""
    assert room(lab, request([1, 2], [3], drafts=[7, 8, 9])) == ({"r0": 4}, [[7, 8, 9]])


@pytest.mark.parametrize("budget, stay", [(1, []), (2, [7]), (4, [7, 8, 9]), (9, [7, 8, 9])])
def test_drafts_get_what_the_budget_leaves(lab, budget, stay):
    """The row is paid first; the drafts are cut to the rest, the first ones stay."""
    assert room(lab, request([1], [3], drafts=[7, 8, 9]), budget=budget) == ({"r0": 1 + len(stay)}, [stay])


def test_rows_of_others_are_paid_first(lab):
    """A chunk of five of a prompt that was admitted behind it is paid before any draft."""
    long = request([0] * 9, name="long")
    long.num_computed_tokens = 0
    rows = {"r0": 1, "long": 5}
    given = room(lab, request([1], [3], drafts=[7, 8, 9]), long, budget=8, rows=rows)
    assert given == ({"r0": 3, "long": 5}, [[7, 8], []])


def test_the_first_that_runs_gets_drafts_first(lab):
    """Two decodes, and budget for three drafts: three for the first, none for the second."""
    both = [request([1], [3], drafts=[7, 8, 9], name=name) for name in "ab"]
    assert room(lab, *both, budget=5) == ({"a": 4, "b": 1}, [[7, 8, 9], []])


@pytest.mark.parametrize("said, stay", [(1, [7, 8, 9]), (6, [7, 8, 9]), (7, [7, 8]), (8, [7]), (9, [])])
def test_no_draft_beyond_max_tokens(lab, said, stay):
    """max_tokens is 10. A pass yields a token more than its drafts: with r to go, r - 1 drafts make sense."""
    made = request([1], [3] * said, max_tokens=10, drafts=[7, 8, 9])
    assert room(lab, made) == ({"r0": 1 + len(stay)}, [stay])


@pytest.mark.parametrize("blocks, stay", [(4, []), (5, [7]), (6, [7, 8]), (7, [7, 8, 9]), (9, [7, 8, 9])])
def test_drafts_get_what_the_pool_leaves(lab, blocks, stay):
    """Four tokens are known, in blocks of one: each draft needs a block that is free."""
    assert room(lab, request([1, 2, 3], [4], drafts=[7, 8, 9]), blocks=blocks) == (
        {"r0": 1 + len(stay)},
        [stay],
    )


def test_a_block_holds_several_drafts(lab):
    """Three tokens are known, and the pool is one block of four: one draft fits into it, without another."""
    assert room(lab, request([1, 2], [4], drafts=[7, 8, 9]), blocks=1, size=4) == ({"r0": 2}, [[7]])


def test_only_decodes_have_drafts(lab):
    """One that computes its prompt's last token, and one that recomputes: their drafts are dropped."""
    prompt, again = (request([1, 2, 3], name=name, drafts=[7, 8]) for name in ("prompt", "again"))
    again.output_token_ids, again.num_computed_tokens = [4, 5], 0
    rows = {"prompt": 1, "again": 5}
    assert room(lab, prompt, again, rows=rows) == (rows, [[], []])


def test_without_a_row_no_drafts(lab):
    """Drafts of one that computes nothing in this step are dropped: in the next they would be out of date."""
    decode, prompt = request([1], [3], drafts=[7, 8]), request([1, 2], name="prompt", drafts=[7, 8])
    prompt.num_computed_tokens = 0
    assert room(lab, decode, prompt, rows={}) == ({}, [[], []])


def test_without_drafts_the_step_stays_as_it_is(lab):
    """Decodes without drafts compute one token, and take no block."""
    kv, made = BlockManager(8, 1, watermark=0), request([1, 2], [3])
    kv.admit(made)
    made.num_computed_tokens, scheduled = 2, {"r0": 1}
    lab.schedule_drafts([made], scheduled, kv, 16)
    assert (scheduled, made.spec_token_ids, kv.num_free_blocks) == ({"r0": 1}, [], 5)


# ------------------------------------------------------------------------------------ verify


def verified(lab, drafts, said, outputs=()):
    """Return the tokens that `verify` keeps if the model says `said`, and each (row, index) asked for."""
    asked, rows = [], [f"row {i}" for i in range(len(drafts) + 1)]

    def sample(row, index):
        asked.append((rows.index(row), index))
        return said[rows.index(row)]

    return list(lab.verify(request([1], outputs, drafts=drafts), rows, sample)), asked


def test_drafts_that_are_said_are_kept(lab):
    """All three drafts are what the model says: they stay, and its last row yields a fourth token."""
    assert verified(lab, [7, 8, 9], [7, 8, 9, 5])[0] == [7, 8, 9, 5]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_first_that_is_not_said_is_replaced(lab, wrong):
    """The model's own token stands in the place of the first wrong draft, and what follows is void."""
    drafts, said = [7, 8, 9], [7, 8, 9, 5]
    drafts[wrong] = 1
    assert verified(lab, drafts, said)[0] == said[: wrong + 1]


def test_right_again_is_too_late(lab):
    """A draft behind a wrong one may be what the model says there, but it was said after another text."""
    assert verified(lab, [7, 1, 9], [7, 8, 9, 5])[0] == [7, 8]


def test_without_drafts_one_token(lab):
    """A row alone yields its token, as in every step so far."""
    assert verified(lab, [], [6])[0] == [6]


def test_each_row_has_its_own_number(lab):
    """Row i is sampled as the output that it would be, so that the same seed says the same text."""
    _, asked = verified(lab, [7, 8, 9], [7, 8, 9, 5], outputs=[2, 3])
    assert asked == [(0, 2), (1, 3), (2, 4), (3, 5)]


def test_no_void_row_is_asked_for(lab):
    """Behind the first draft that is not kept no row is sampled."""
    assert verified(lab, [7, 8, 9], [7, 4, 9, 5])[1] == [(0, 0), (1, 1)]


def test_verifying_changes_nothing(lab):
    """The request's outputs, counters and drafts are `rewind`'s to change."""
    made = request([1], [2], drafts=[7, 8])
    before = {name: repr(value) for name, value in vars(made).items()}
    lab.verify(made, ["a", "b", "c"], lambda row, index: 7)
    assert {name: repr(value) for name, value in vars(made).items()} == before


def test_drafts_are_drawn_as_without_them(lab):
    """With temperature 1 a draft stays if the token drawn in its place is that one, likely or not."""
    made = request([3, 1, 4], temperature=1.0, seed=3, max_tokens=12)
    text = text_alone(made)
    held = list(enumerate([3, 1, 4, *text]))
    made.output_token_ids, made.spec_token_ids = text[:1], text[1:6]
    rows = [row_after(held[:place]) for place in range(4, 10)]
    assert any(row.index(max(row)) != token for row, token in zip(rows, text[1:], strict=False))
    assert list(lab.verify(made, rows, chooser(made))) == text[1:7]
    made.spec_token_ids = likeliest = [row.index(max(row)) for row in rows[:5]]
    said = next(i for i, token in enumerate(text[1:]) if token != likeliest[i])
    assert list(lab.verify(made, rows, chooser(made))) == text[1 : said + 2]


# ------------------------------------------------------------------------------------ rewind


def rewound(lab, made, token_ids, *, size=2, caching=False):
    """Rewind a request that has computed its last token and its drafts; (accepted drafts, the pool)."""
    kv = BlockManager(32, size, enable_prefix_caching=caching, watermark=0)
    computed = made.num_computed_tokens
    assert kv.admit(made)
    made.num_computed_tokens = computed
    kv.cache_blocks(made)
    assert kv.allocate(made, 1 + len(made.spec_token_ids))
    accepted = lab.rewind(made, token_ids, kv)
    kv.check()
    return accepted, kv


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_the_counter_stands_behind_what_was_accepted(lab, num):
    """Three drafts were computed. Whatever is kept of them, all known tokens are computed but the last."""
    made = request([1, 2, 3], [4], drafts=[7, 8, 9])
    accepted, _ = rewound(lab, made, [7, 8, 9, 5][:num])
    assert made.output_token_ids == [4, *[7, 8, 9, 5][:num]]
    assert (made.num_computed_tokens, made.num_new_tokens) == (3 + num, 1)
    assert accepted == num - 1


@pytest.mark.parametrize("num, held", [(1, 4), (2, 5), (3, 6), (4, 7)])
def test_blocks_of_rejected_drafts_are_given_back(lab, num, held):
    """In blocks of one, seven hold the computed tokens and three drafts; what is void is free at once."""
    made = request([1, 2, 3], [4], drafts=[7, 8, 9])
    _, kv = rewound(lab, made, [7, 8, 9, 5][:num], size=1)
    assert len(kv.block_table(made)) == held
    assert kv.num_free_blocks == 32 - held


@pytest.mark.parametrize("num, full", [(1, 2), (2, 2), (3, 3), (4, 3)])
def test_only_what_was_accepted_is_published(lab, num, full):
    """In blocks of two: a block with a rejected draft in it cannot be found, by its text or another."""
    made = request([1, 2, 3], [4], drafts=[7, 8, 9])
    _, kv = rewound(lab, made, [7, 8, 9, 5][:num], caching=True)
    assert kv.num_cached_blocks == full
    newcomer = request([*made.token_ids(), 0], name="newcomer")
    assert len(kv.get_computed_blocks(newcomer)) == full
    assert len(kv.get_computed_blocks(request([1, 2, 3, 4, 7, 8, 9, 0], name="other"))) == full


def test_a_stop_among_the_tokens_ends_it_there(lab):
    """Token 8 is a stop: it is the last output, and what was sampled behind it never was."""
    made = request([1, 2, 3], [4], drafts=[7, 8, 9], stop_token_ids=[8])
    accepted, _ = rewound(lab, made, [7, 8, 9, 5])
    assert (made.output_token_ids, made.finish_reason) == ([4, 7, 8], "stop")
    assert (made.num_computed_tokens, accepted) == (5, 1)


def test_max_tokens_among_the_tokens_ends_it_there(lab):
    """The third output is the last that may be."""
    made = request([1, 2, 3], [4], max_tokens=3, drafts=[7, 8, 9])
    accepted, kv = rewound(lab, made, [7, 8, 9, 5], size=1)
    assert (made.output_token_ids, made.finish_reason, accepted) == ([4, 7, 8], "length", 1)
    assert len(kv.block_table(made)) == made.num_computed_tokens == 5


def test_it_goes_on_without_a_stop(lab):
    """No stop, no finish_reason."""
    made = request([1, 2, 3], [4], drafts=[7])
    rewound(lab, made, [7, 5])
    assert made.finish_reason is None


def test_no_draft_is_left(lab):
    """Drafts are for one step; the list that the proposer returned is not changed."""
    made = request([1, 2, 3], [4], drafts=[7, 8])
    drafts = made.spec_token_ids
    rewound(lab, made, [7, 5])
    assert (made.spec_token_ids, drafts) == ([], [7, 8])


def test_the_tokens_are_only_read(lab):
    """The list of what was sampled belongs to the caller."""
    made, token_ids = request([1, 2, 3], [4], drafts=[7, 8], stop_token_ids=[7]), [7, 8, 5]
    rewound(lab, made, token_ids)
    assert token_ids == [7, 8, 5]
    made.output_token_ids.append(6)
    assert token_ids == [7, 8, 5]


def test_a_step_without_drafts(lab):
    """One token, none accepted: the end of a prompt, or a decode as before."""
    made = request([1, 2, 3])
    assert rewound(lab, made, [4])[0] == 0
    assert (made.output_token_ids, made.num_computed_tokens) == ([4], 3)


# ------------------------------------------------------------------------------------ sampled drafts


def row(*weights):
    """A distribution, in exact fractions."""
    return [Fraction(weight, sum(weights)) for weight in weights]


def exactly(probabilities):
    return [Fraction(one).limit_denominator(10**6) for one in probabilities]


def test_the_residual_is_what_is_missing(lab):
    """p has 1/2, 1/4, 1/4 and q 1/4, 1/4, 1/2: only the first token is missing."""
    assert exactly(lab.residual(row(2, 1, 1), row(1, 1, 2))) == [1, 0, 0]


def test_the_residual_adds_up_to_one(lab):
    """p has 3/10 too much at the first token and 1/10 at the second: 3/4 and 1/4."""
    assert exactly(lab.residual(row(5, 3, 2), row(2, 2, 6))) == [Fraction(3, 4), Fraction(1, 4), 0]


def test_the_residual_of_equals(lab):
    """If p and q are equal nothing is missing: p itself."""
    assert exactly(lab.residual(row(1, 2, 3), row(1, 2, 3))) == row(1, 2, 3)


def test_the_residual_changes_nothing(lab):
    """The two rows are only read, and the result is a list of its own."""
    p, q = row(1, 2, 3), row(1, 2, 3)
    lab.residual(p, q).clear()
    assert (p, q) == (row(1, 2, 3), row(1, 2, 3))


def outcomes(lab, drafts, target, draft):
    """All that may come of some drafts, with exact probabilities."""
    return distribution(lambda chance: lab.rejection_sample(drafts, target, draft, chance))


def test_a_draft_that_is_too_likely_is_accepted_in_part(lab):
    """q says token 0 with 3/4, p with 1/4: it is accepted with 1/3, else token 1 takes its place."""
    found = outcomes(lab, [0], [row(1, 3), row(1, 0)], [row(3, 1)])
    assert found == {(0, 0): Fraction(1, 3), (1,): Fraction(2, 3)}


def test_a_draft_that_is_not_likely_enough_is_always_accepted(lab):
    """q says token 1 with 1/4, p with 3/4: nothing is rejected, and the last row yields a token more."""
    found = outcomes(lab, [1], [row(1, 3), row(1, 1)], [row(3, 1)])
    assert found == {(1, 0): Fraction(1, 2), (1, 1): Fraction(1, 2)}


def test_the_rest_is_void(lab):
    """If the first of two drafts is never accepted, one token comes, whatever the second was."""
    found = outcomes(lab, [0, 1], [row(0, 1), row(1, 1), row(1, 1)], [row(1, 1), row(1, 1)])
    assert found == {(1,): Fraction(1)}


def test_each_draft_has_its_rows(lab):
    """Two drafts with different rows: each is accepted, or replaced, by its own."""
    target, draft = [row(1, 1, 2), row(2, 1, 0), row(0, 1, 1)], [row(2, 1, 1), row(1, 2, 1)]
    found = outcomes(lab, [0, 1], target, draft)
    # p / q is 1/2 and then 2/3. The first draft is replaced by what row 0 lacks, the second by row 1's.
    ways = {(2,): 3, (0, 0): 1, (0, 1, 1): 1, (0, 1, 2): 1}
    assert found == {outcome: Fraction(sixths, 6) for outcome, sixths in ways.items()}


def test_without_drafts_a_row_is_drawn_from(lab):
    """No draft: a token from the target's only row."""
    assert outcomes(lab, [], [row(1, 3)], []) == {(0,): Fraction(1, 4), (1,): Fraction(3, 4)}


@pytest.mark.parametrize(
    "p, q", [((1, 3), (3, 1)), ((0, 1, 4), (2, 2, 1)), ((5, 0, 1), (1, 1, 1)), ((1, 2), (1, 2))]
)
def test_the_first_token_is_the_targets(lab, p, q):
    """Over all drafts that q may draw, the token that comes out has exactly the probabilities of p."""

    def play(chance):
        draft = chance.draw(row(*q))
        return lab.rejection_sample([draft], [row(*p), row(*p)], [row(*q)], chance)[:1]

    assert distribution(play) == {(i,): weight for i, weight in enumerate(row(*p)) if weight}


def test_the_text_is_the_targets(lab):
    """Two drafts a step until four tokens are there: the texts have exactly the target's probabilities."""

    def target(text):
        return row(1 + sum(text) % 3, 1, 2 if text else 0)

    def drafter(text):
        return row(2, 1 + len(text) % 2, 1)

    def speculative(chance):
        text = []
        while len(text) < 4:
            drafts = []
            for _ in range(2):
                drafts.append(chance.draw(drafter(text + drafts)))
            seen = [text + drafts[:i] for i in range(3)]
            text += lab.rejection_sample(
                drafts, [target(s) for s in seen], [drafter(s) for s in seen[:2]], chance
            )
        return text[:4]

    def plain(chance):
        text = []
        for _ in range(4):
            text.append(chance.draw(target(text)))
        return text

    assert distribution(speculative) == distribution(plain)


# ------------------------------------------------------------------------------------ whole runs


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_text_is_that_of_a_run_alone(lab, name):
    """In a batch, chunked, preempted, greedy or drawn: token for token the text without drafts."""
    played = scenarios.play(lab, SCENARIOS[name])
    assert_drained(played.trace)
    for made in played.requests.values():
        assert made.output_token_ids == text_alone(made), made.request_id


def test_drawn_workloads(lab):
    """In 30 random workloads, with small pools, seeds and stops, the texts are right and all blocks free."""
    for scenario in scenarios.draw(7, 30):
        played = scenarios.play(lab, scenario)
        assert_drained(played.trace)
        kv = played.loop.kv
        assert kv.num_free_blocks == kv.num_blocks
        for made in played.requests.values():
            assert made.output_token_ids == text_alone(made), (scenario["name"], made.request_id)


def test_a_step_yields_more_than_one_token(lab):
    """20 tokens of a text that quotes itself take at most half the steps, and the counts add up."""
    scenario = SCENARIOS["a draft model"]
    played = scenarios.play(lab, scenario)
    num_steps, accepted = len(played.trace.steps), sum(played.loop.accepted.values())
    assert num_steps <= 10
    assert num_steps + accepted == 20


def test_what_was_rejected_is_not_read(lab):
    """The model's memory at each position that a request has computed holds that request's token."""
    scenario = SCENARIOS["one that quotes"]
    loop, made = spec_loop(lab, scenario["config"]), request_of(scenario["requests"][0])
    assert isinstance(loop.model, QuotingModel)
    loop.add(made)
    while loop.has_work:
        scheduled = loop.schedule()
        loop.update(scheduled, loop.compute(scheduled))
        slots = loop.kv.slot_mapping(made, 0, made.num_computed_tokens) if loop.has_work else []
        held = [loop.model.slots[slot] for slot in slots]
        assert held == list(enumerate(made.token_ids()))[: len(held)]


# ------------------------------------------------------------------------------------ at random


def test_random_scripts(lab):
    """Texts, caches, steps and chance in 160 random scripts, beside a slow model of all of them."""
    judge_random_scripts("lab-10", lab)
