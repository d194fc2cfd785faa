"""Tests of a fused step: its mask, its rectangle, its way back into the caches, and the whole."""

import re
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from labs.kit import Owner, assert_drained, assert_rows, judge_random_scripts, load, make_request, tokens_of
from labs.kit.tensor_toys import dense, elsewhere
from labs.kit.tensor_toys.models import SMALL, random_model, text_alone
from mini_engine.backends.dense import DenseCache

scenarios = load("lab-04", "scenarios")
SCENARIOS = {scenario["name"]: scenario for scenario in scenarios.SCENARIOS}
SHAPES = scenarios.SHAPES
SHOWN, WIDE = 8, 40  # queries, and columns, that are shown of a wrong mask
DEVICE_SHAPES = [([3, 0], [1, 4]), ([0, 0], [3, 2]), ([2, 4], [1, 1])]  # pads in both parts, or in one only


def mask_of(lab, past_lens, num_new):
    mask = lab.fused_attention_mask(torch.tensor(past_lens), torch.tensor(num_new))
    check_shape(mask, past_lens, num_new)
    return mask


def check_shape(mask, past_lens, num_new):
    """In words, before the cells are looked at."""
    __tracebackhide__ = True
    shape = (len(num_new), 1, max(num_new), max(past_lens) + max(num_new))
    said = "(B, 1, T_max, P_max + T_max), the 1 for the heads"
    if tuple(mask.shape) != shape:
        raise AssertionError(f"the mask has shape {tuple(mask.shape)}, not {shape}: {said}")
    if mask.dtype != torch.bool:
        raise AssertionError(f"the mask is of {mask.dtype}, not of bool")


def picture(mask, row):
    """One request's mask as lines of text, a query a line: x may be seen, . may not."""
    return ["".join("x" if cell else "." for cell in line) for line in mask[row, 0].tolist()]


def check_real(mask, past_lens, num_new, row, expected):
    """The last queries of a row, of which `expected` is the picture, see what they should."""
    __tracebackhide__ = True
    ours = picture(mask, row)[-len(expected) :]
    if ours == expected:
        return
    lines = [
        f"a wrong mask of past_lens={past_lens}, num_new={num_new}",
        f"of row {row}, past {past_lens[row]} and new {num_new[row]}; what may be seen is an x",
    ]
    for query, (mine, right) in enumerate(zip(ours, expected, strict=True), start=num_new[row] - len(ours)):
        if mine != right:
            at = next(column for column, pair in enumerate(zip(mine, right, strict=True)) if len({*pair}) > 1)
            start = at - at % WIDE  # of a wide mask, the part that holds the first wrong column
            where = f" from column {start} on" if len(right) > WIDE else ""
            mine, right = (line[start : start + WIDE] for line in (mine, right))
            lines.append(f"    query {query} sees {mine}, but should see {right}{where}")
    raise AssertionError("\n".join(lines[: 2 + SHOWN]))


def check_rows(tensor, expected, what, names):
    """`tensor` has these rows; in words, and row by row."""
    __tracebackhide__ = True
    ours = tensor.tolist()
    assert len(ours) == len(expected), f"{what} has {len(ours)} rows, not {len(expected)}"
    for name, mine, right in zip(names, ours, expected, strict=True):
        if mine != right:
            raise AssertionError(f"{what} of {name}: {mine}, but should be {right}")


def stands(caches):
    """Return how many tokens each cache holds, and its identity."""
    return {name: (id(cache), len(cache)) for name, cache in caches.items()}


def owner(row, rows):
    """Return the owner of a row of logits, with its past and its pads."""
    widest = max(num_tokens for _, num_tokens, _ in rows)
    request = row.request
    return Owner(request.request_id, past=request.num_computed_tokens, pads=widest - row.num_tokens)


def assert_alone(logits, rows, shape="", dtype=torch.float64, **tolerance):
    """`logits` has an entry for each row that is sampled, that of a run alone, and for no other."""
    __tracebackhide__ = True
    sampled = [row for row in rows if row.is_last]
    names = [row.request.request_id for row in sampled]
    strangers = [name for name in logits if not isinstance(name, str)]
    if strangers:
        raise AssertionError(f"the result is found by request_id, not by a {type(strangers[0]).__name__}")
    if sorted(logits) != sorted(names):
        raise AssertionError(f"logits of {sorted(logits)}; sampled are {sorted(names)}")
    if names:
        expected = torch.stack([dense.alone(row.request.token_ids())[0] for row in sampled])
        ours = [logits[name] for name in names]
        assert_shapes(ours, expected[0], names, dtype)
        owners = [owner(row, rows) for row in sampled]
        partial = [row for row in rows if not row.is_last]
        others = {str(owner(row, rows)): dense.alone(so_far(row))[0] for row in partial}
        assert_rows(torch.stack(ours), expected, f"logits{shape}", owners, others=others, **tolerance)


def move(caches):
    """To the other device."""
    for cache in caches.values():
        cache.k, cache.v = elsewhere.moved(cache.k), elsewhere.moved(cache.v)


def so_far(row):
    """The tokens of a row's request up to the end of its chunk."""
    return row.request.token_ids(0, row.request.num_computed_tokens + row.num_tokens)


def assert_shapes(ours, expected, names, dtype):
    __tracebackhide__ = True
    for row, name in zip(ours, names, strict=True):
        if row.shape != expected.shape:
            shapes = f"{tuple(row.shape)}, not {tuple(expected.shape)}"
            raise AssertionError(f"the logits of {name} have shape {shapes}")
        if row.dtype != dtype:
            raise AssertionError(f"the logits of {name} are of {row.dtype}, but the model gives {dtype}")


def assert_caches_alone(caches, rows):
    """The caches of these rows hold what runs alone store, up to where the rows end."""
    __tracebackhide__ = True
    for request, num_tokens, _ in rows:
        name, past = request.request_id, request.num_computed_tokens
        _, alone = dense.alone(request.token_ids(0, past + num_tokens))
        held = len(caches[name])
        assert held == past + num_tokens, (
            f"{name} has {past} in the past and {num_tokens} new, {held} in its cache"
        )
        owners = [Owner(name, position) for position in range(held)]
        for layer in range(SMALL.num_hidden_layers):
            pairs = zip(caches[name].get(layer), alone.get(layer), strict=True)
            for what, (ours, expected) in zip(("keys", "values"), pairs, strict=True):
                assert_rows(ours, expected, f"layer {layer}'s {what} of {name}", owners)


def assert_unchanged(rows, before):
    """`rows` and its requests are as they were in `before`, a copy: to read, not to change."""
    __tracebackhide__ = True
    assert [row[1:] for row in rows] == [row[1:] for row in before], (
        "rows is the schedule's own list; it was changed"
    )
    for (request, *_), (was, *_) in zip(rows, before, strict=True):
        for field, old in vars(was).items():
            if (value := getattr(request, field)) != old:
                raise AssertionError(f"{field} of {was.request_id} was changed from {old} to {value}")


# ----------------------------------------------------------------------------------------- the mask


def test_mask_has_a_dimension_for_the_heads(lab):
    """The mask is bool (B, 1, T_max, P_max + T_max), so that it serves every head."""
    mask_of(lab, [21, 14, 8, 0], [1, 1, 1, 8])


def test_mask_cell_by_cell(lab):
    """Past 4, three new tokens, two rows, one with two pads in its past: all 42 cells, in either order."""
    padded, full = ["..xxx..", "..xxxx.", "..xxxxx"], ["xxxxx..", "xxxxxx.", "xxxxxxx"]
    for past_lens, rows in (([2, 4], (padded, full)), ([4, 2], (full, padded))):
        mask = mask_of(lab, past_lens, [3, 3])  # twice the same shape, but not the same mask
        for row, expected in enumerate(rows):
            check_real(mask, past_lens, [3, 3], row, expected)


def test_pads_of_the_new_tokens_are_masked(lab):
    """A decode beside a 4-token chunk sees its past and itself, and none of its 3 new pads."""
    mask = mask_of(lab, [3, 1], [1, 4])
    check_real(mask, [3, 1], [1, 4], 0, ["xxx...x"])
    check_real(mask, [3, 1], [1, 4], 1, ["..xx...", "..xxx..", "..xxxx.", "..xxxxx"])


def test_mask_without_any_past(lab):
    """First chunks only: no column for the past, and each row's own lower triangle."""
    mask = mask_of(lab, [0, 0], [3, 2])
    check_real(mask, [0, 0], [3, 2], 0, ["x..", "xx.", "xxx"])
    check_real(mask, [0, 0], [3, 2], 1, [".x.", ".xx"])


def test_the_counts_are_only_read(lab):
    """past_lens and num_new are as they were afterwards: the batch holds them, too."""
    for past_lens, num_new in (([2, 4], [3, 1]), ([0, 0], [1, 2])):
        counts = torch.tensor(past_lens), torch.tensor(num_new)
        lab.fused_attention_mask(*counts)
        for name, tensor, old in zip(("past_lens", "num_new"), counts, (past_lens, num_new), strict=True):
            now = tensor.tolist()
            if now != old:
                raise AssertionError(f"{name} was changed in place, from {old} to {now}")


def test_no_nan_from_a_softmax_written_by_hand(lab):
    """Two layers of plain softmax give no NaN: a row has no past and three pads, the other a past or none."""
    for past in (3, 0):
        mask = mask_of(lab, [0, past], [1, 4])
        x = torch.randn(2, past + 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            scores = (x[:, past:] @ x.transpose(1, 2)).masked_fill(~mask[:, 0], float("-inf"))
            # A query that may see nothing has the weights 0 / 0 here, and the next layer takes them in.
            x = torch.cat((x[:, :past], torch.softmax(scores, dim=-1) @ x), dim=1)
        spoilt = [row for row, new in ((0, 1), (1, 4)) if bool(x[row, -new:].isnan().any())]
        assert not spoilt, f"NaN has reached the real tokens of rows {spoilt}"


def test_the_mask_is_made_where_the_counts_are(lab):
    """past_lens on another device than the CPU: every tensor is made there, and the mask is the same."""
    for past_lens, num_new in DEVICE_SHAPES:
        with elsewhere.Elsewhere():
            counts = (elsewhere.moved(torch.tensor(x)) for x in (past_lens, num_new))
            mask = lab.fused_attention_mask(*counts)
        said = f"with past_lens={past_lens}, num_new={num_new}"
        assert mask.device.type == "meta", f"{said} on another device the mask was made on the CPU"
        same = elsewhere.here(mask).tolist() == mask_of(lab, past_lens, num_new).tolist()
        assert same, f"{said} on another device the mask is another one than on the CPU"


# ------------------------------------------------------------------------------------ the rectangle


def test_the_worked_example(lab):
    """Decodes of 22, 15 and 9 tokens and 8 of a prompt's 13: 11 tokens, four rows, eight columns."""
    rows, caches = scenarios.worked_example()
    batch = lab.assemble_fused_batch(rows, caches)
    last = [request.output_token_ids[0] for request, *_ in rows[:3]]
    names = ["r0", "r1", "r2", "r3"]
    assert batch.request_ids == names
    tokens = [[0] * 7 + [token] for token in last] + [rows[3].request.prompt_token_ids[:8]]
    check_rows(batch.tokens, tokens, "tokens", names)
    positions = [[0] * 7 + [p] for p in (21, 14, 8)] + [list(range(8))]
    check_rows(batch.positions, positions, "positions", names)
    assert batch.past_lens.tolist() == [21, 14, 8, 0]
    assert batch.num_new.tolist() == [1, 1, 1, 8]
    assert list(batch.is_last) == [True, True, True, False]
    for what in ("tokens", "positions", "past_lens", "num_new"):
        dtype = getattr(batch, what).dtype
        if dtype != torch.int64:
            raise AssertionError(f"{what} is of {dtype}, not of int64")


def test_22_tokens_decode_at_position_21(lab):
    """Positions count from 0: the last of 22 tokens is computed at 21, behind 21 in the cache."""
    request, cache = dense.mid_flight("A", 21, 1, outputs=1)
    assert request.num_tokens == 22
    batch = lab.assemble_fused_batch([dense.row(request, 1)], {"A": cache})
    assert batch.positions.tolist() == [[21]]


def test_a_later_chunk_goes_on_where_the_last_one_stopped(lab):
    """The second chunk of a prompt has the positions 8 to 12, not 0 to 4, and its own tokens."""
    request, cache = dense.mid_flight("D", 8, 12)
    batch = lab.assemble_fused_batch([dense.row(request, 5)], {"D": cache})
    check_rows(batch.positions, [[8, 9, 10, 11, 12]], "positions", ["D"])
    check_rows(batch.tokens, [request.prompt_token_ids[8:13]], "tokens", ["D"])


def test_a_chunk_of_one_token_is_the_next_one(lab):
    """One token out of the middle, of a prompt or of outputs that are computed again, is the next in turn."""
    for past, outputs in ((2, 0), (0, 0), (2, 3), (5, 3)):
        request, cache = dense.mid_flight("slow", past, 7 - past, outputs=outputs)
        batch = lab.assemble_fused_batch([dense.row(request, 1)], {"slow": cache})
        check_rows(batch.positions, [[past]], "positions", ["slow"])
        check_rows(batch.tokens, [request.token_ids(past, past + 1)], "tokens", ["slow"])


def test_outputs_are_computed_again_after_a_preemption(lab):
    """An evicted request with 4 + 3 tokens and an empty cache brings all 7, its outputs included."""
    request, cache = dense.mid_flight("back", 0, 7, outputs=3)
    batch = lab.assemble_fused_batch([dense.row(request, 7)], {"back": cache})
    check_rows(batch.tokens, [request.prompt_token_ids + request.output_token_ids], "tokens", ["back"])


def test_rows_keep_the_order_of_the_schedule(lab):
    """A chunk before a decode stays before it: names, tokens, positions and counts in one order."""
    rows, caches = dense.fleet([(5, 3), (9, 1), (0, 2)])
    batch = lab.assemble_fused_batch(rows, caches)
    assert batch.request_ids == ["r0", "r1", "r2"]
    check_rows(batch.positions, [[5, 6, 7], [0, 0, 9], [0, 0, 1]], "positions", batch.request_ids)
    assert batch.tokens[1].tolist() == [0, 0, rows[1][0].output_token_ids[0]]
    assert (batch.past_lens.tolist(), batch.num_new.tolist()) == ([5, 9, 0], [3, 1, 2])


def test_only_the_chunk_that_ends_a_sequence_is_last(lab):
    """A decode and a prompt's last chunk are sampled; a chunk with more to come is not, even of one token."""
    rows, caches = dense.fleet([(9, 1), (4, 6), (0, 5), (7, 4)])
    rows[1], rows[3] = dense.row(rows[1].request, 3), dense.row(rows[3].request, 1)
    assert lab.assemble_fused_batch(rows, caches).is_last == [True, False, True, False]


def test_the_end_of_the_prompt_is_not_the_end_of_the_sequence(lab):
    """A preempted request, 4 + 3 tokens, is not sampled at its prompt's end: what follows is known."""
    request, cache = dense.mid_flight("back", 0, 7, outputs=3)
    for num_tokens in (1, 4, 5):  # also not where it has outputs and is given a single token
        batch = lab.assemble_fused_batch([dense.row(request, num_tokens)], {"back": cache})
        assert batch.is_last == [False], f"sampled after {num_tokens} of 7 tokens"
    assert lab.assemble_fused_batch([dense.row(request, 7)], {"back": cache}).is_last == [True]
    for past in (4, 5):  # amid its outputs, a token at a time
        request, cache = dense.mid_flight("back", past, 7 - past, outputs=3)
        batch = lab.assemble_fused_batch([dense.row(request, 1)], {"back": cache})
        assert batch.is_last == [False], f"sampled after {past + 1} of 7 tokens"


def test_token_0_is_a_token(lab):
    """A prompt may hold token 0, which the pads are made of too: it is counted, and has its position."""
    request, cache = dense.mid_flight("chat", 5, 5)
    zeros = make_request("zeros", [0, 7, 0])
    caches = {"chat": cache, "zeros": dense.empty_cache()}
    batch = lab.assemble_fused_batch([dense.row(request, 5), dense.row(zeros, 3)], caches)
    assert batch.num_new.tolist() == [5, 3]
    check_rows(batch.positions, [[5, 6, 7, 8, 9], [0, 0, 0, 1, 2]], "positions", batch.request_ids)
    check_real(batch.mask, [5, 0], [5, 3], 1, [".......x..", ".......xx.", ".......xxx"])


def test_long_sequences_and_large_token_ids(lab):
    """Positions beyond 32,767, a chunk of 600 and ids of up to 2**31: sizes change nothing in the layout."""
    edges = [0, 1, 4095, 4096, 2**16, 2**20, 2**20 + 1, 2**24 + 1, 2**31]
    for past_lens, num_new in (([2**15, 3], [1, 2]), ([0, 2], [600, 1])):
        rows, caches = dense.long_rows(past_lens, num_new, edges)
        batch, width = lab.assemble_fused_batch(rows, caches), max(num_new)
        pads = [[0] * (width - n) for n in num_new]
        places = [range(past, past + n) for past, n in zip(past_lens, num_new, strict=True)]
        tokens = [pad + row[0].token_ids()[-row[1] :] for pad, row in zip(pads, rows, strict=True)]
        check_rows(batch.tokens, tokens, "tokens", batch.request_ids)
        positions = [[*pad, *own] for pad, own in zip(pads, places, strict=True)]
        check_rows(batch.positions, positions, "positions", batch.request_ids)
        check_shape(batch.mask, past_lens, num_new)
        for row, own in enumerate(places):
            seen = batch.mask[row, 0, -len(own) :].sum(dim=-1).tolist()
            wrong = [p for p, count in zip(own, seen, strict=True) if count != p + 1]
            assert not wrong, f"position {wrong[0]} of r{row} sees {seen[wrong[0] - own[0]]} keys"


def test_the_batch_is_on_the_device_of_the_caches(lab):
    """Caches on another device than the CPU: tokens, positions, counts and mask are made there."""
    for past_lens, num_new in DEVICE_SHAPES:
        rows, caches = dense.fleet(list(zip(past_lens, num_new, strict=True)))
        on_cpu = lab.assemble_fused_batch(rows, caches)
        move(caches)
        with elsewhere.Elsewhere():
            batch = lab.assemble_fused_batch(rows, caches)
        for name in ("tokens", "positions", "past_lens", "num_new", "mask"):
            ours, expected = getattr(batch, name), getattr(on_cpu, name)
            assert ours.device.type == "meta", f"the caches are on another device; {name} is on the CPU"
            same = elsewhere.here(ours).tolist() == expected.tolist()
            assert same, f"{name} on another device are others than on the CPU"


def test_a_stale_cache_is_refused(lab):
    """A cache that holds more or less than is computed is refused in any row, with name and both numbers."""
    for computed, held, num_tokens in ((0, 5, 8), (5, 0, 3), (0, 5, 2), (5, 3, 3), (5, 4, 1)):
        rows, caches = dense.fleet([(9, 1), (3, 4)])
        request, caches["evicted"] = dense.mid_flight("evicted", held, 8 - held)
        request.num_computed_tokens = computed
        rows.insert(1, dense.row(request, num_tokens))
        before, stood = deepcopy(rows), stands(caches)
        with pytest.raises(ValueError, match="evicted") as refusal:
            lab.assemble_fused_batch(rows, caches)
        missing = {str(computed), str(held)} - set(re.findall(r"\d+", str(refusal.value)))
        if missing:
            wanted = f"{computed} computed tokens and {held} in the cache"
            raise AssertionError(f"the message should have both numbers, {wanted}; it is: {refusal.value}")
        assert_unchanged(rows, before)
        if stands(caches) != stood:
            raise AssertionError(f"after the refusal caches are {sorted(caches)}, not as they were")


def test_what_visible_pads_would_do(lab):
    """With the new tokens' pads visible a decode's logits move by more than 0.1; with your mask, not."""
    rows, caches = dense.fleet([(21, 1), (0, 8)])
    expected = dense.alone(rows[0][0].token_ids())[0]
    batch = lab.assemble_fused_batch(rows, caches)
    check_shape(batch.mask, [21, 0], [1, 8])
    yours = (dense.logits_under(batch.mask, batch, caches)[0] - expected).abs().max().item()
    seen = batch.mask.clone()
    seen[..., -8:] = torch.ones(8, 8, dtype=torch.bool).tril()  # every new token counts as real
    visible = (dense.logits_under(seen, batch, caches)[0] - expected).abs().max().item()
    print(
        "a decode of 22 tokens beside an 8-token chunk: "
        f"its logits span {expected.max() - expected.min():.1f};\n"
        f"under your mask they move by {yours:.0e}, "
        f"with its seven new pads visible by {visible:.1f}"
    )
    assert yours < 1e-9, f"under your mask the decode's logits move by {yours:.2g}"
    assert visible > 0.1


# ------------------------------------------------------------------------------------ the way back


def by_hand(lab, num_new, layers=2):
    """A batch of which only names and counts matter, and new keys that say where they come from."""
    batch = lab.FusedBatch(
        request_ids=[f"r{row}" for row in range(len(num_new))],
        tokens=torch.zeros(len(num_new), max(num_new), dtype=torch.long),
        positions=torch.zeros(len(num_new), max(num_new), dtype=torch.long),
        past_lens=torch.zeros(len(num_new), dtype=torch.long),
        num_new=torch.tensor(num_new),
        mask=torch.ones(len(num_new), 1, max(num_new), max(num_new), dtype=torch.bool),
        is_last=[True] * len(num_new),
    )
    places = 100.0 * torch.arange(1, len(num_new) + 1)[:, None] + torch.arange(max(num_new))
    k = places[:, :, None, None].expand(-1, -1, 2, 8).double()
    new_kv = [(1000 * layer + k, -1000 * layer - k) for layer in range(1, layers + 1)]
    config = replace(SMALL, num_hidden_layers=layers)
    caches = {name: DenseCache(config, torch.float64) for name in batch.request_ids}
    return batch, new_kv, caches


def stored(cache, layer):
    """Return a cache's entries in a layer as (key, value) numbers; each row is constant."""
    k, v = cache.get(layer)
    return list(zip(k[:, 0, 0].tolist(), v[:, 0, 0].tolist(), strict=True))


def check_held(caches, expected):
    """How many tokens the caches hold, in their order."""
    __tracebackhide__ = True
    for (name, cache), held in zip(caches.items(), expected, strict=True):
        if len(cache) != held:
            raise AssertionError(f"the cache of {name} holds {len(cache)} tokens, but should hold {held}")


def test_exactly_the_new_real_rows_are_stored(lab):
    """Rows with 1, 4 and 2 new tokens store 1, 4 and 2, from the right end of the rectangle."""
    batch, new_kv, caches = by_hand(lab, [1, 4, 2])
    lab.disassemble_fused_cache(batch, new_kv, caches)
    check_held(caches, [1, 4, 2])
    assert stored(caches["r0"], 0) == [(1103, -1103)]
    assert stored(caches["r1"], 0) == [(1200 + t, -1200 - t) for t in range(4)]
    assert stored(caches["r2"], 0) == [(1302, -1302), (1303, -1303)]


def test_rows_that_are_not_sampled_are_stored_as_well(lab):
    """A partial chunk goes on in a later step, which needs its keys: is_last has no say in this."""
    batch, new_kv, caches = by_hand(lab, [2, 3])
    batch.is_last[:] = [False, True]
    lab.disassemble_fused_cache(batch, new_kv, caches)
    check_held(caches, [2, 3])


def test_caches_are_found_by_name(lab):
    """The caches stand in another order than the rows, and a request that is not in the step has one, too."""
    batch, new_kv, _ = by_hand(lab, [1, 4, 2])
    batch.request_ids[:] = ["new", "chat", "old"]
    caches = {name: dense.empty_cache() for name in ("idle", "old", "chat", "new")}
    lab.disassemble_fused_cache(batch, new_kv, caches)
    check_held(caches, [0, 2, 4, 1])
    assert stored(caches["old"], 0) == [(1302, -1302), (1303, -1303)]


def test_not_a_digit_is_lost(lab):
    """float64 keys and values are stored in float64, to the last digit."""
    batch, new_kv, caches = by_hand(lab, [2, 3])
    new_kv = [(k / 3, v / 7) for k, v in new_kv]
    lab.disassemble_fused_cache(batch, new_kv, caches)
    for what, ours, new in zip(("keys", "values"), caches["r1"].get(1), new_kv[1], strict=True):
        off = (ours - new[1, -3:]).abs().max().item()
        assert off == 0, f"the {what} of r1 in layer 1 were rounded: they are off by {off:.1g}"


def test_batch_and_new_keys_are_only_read(lab):
    """The batch and the list of new keys and values are as they were."""
    batch, new_kv, caches = by_hand(lab, [1, 3])
    ids, old = list(batch.request_ids), [(k.clone(), v.clone()) for k, v in new_kv]
    lab.disassemble_fused_cache(batch, new_kv, caches)
    assert batch.request_ids == ids, "batch.request_ids was changed"
    assert batch.num_new.tolist() == [1, 3], "batch.num_new was changed"
    assert len(new_kv) == len(old), f"new_kv had {len(old)} layers, and has {len(new_kv)} now"
    for ours, was in zip(new_kv, old, strict=True):
        same = all(map(torch.equal, ours, was))
        assert same, "the tensors of new_kv were changed"


def test_every_layer_gets_its_own(lab):
    """Layer 1's keys and values go to layer 1, keys as keys and values as values; so in all five layers."""
    batch, new_kv, caches = by_hand(lab, [2, 1], layers=5)
    lab.disassemble_fused_cache(batch, new_kv, caches)
    assert stored(caches["r0"], 1) == [(2100, -2100), (2101, -2101)]
    assert stored(caches["r1"], 1) == [(2201, -2201)]
    assert stored(caches["r1"], 4) == [(5201, -5201)]


def test_a_long_chunk_is_stored_whole(lab):
    """600 new tokens beside one: 600 are stored."""
    batch, new_kv, caches = by_hand(lab, [600, 1])
    lab.disassemble_fused_cache(batch, new_kv, caches)
    check_held(caches, [600, 1])


# -------------------------------------------------------------------------------------- the whole


@pytest.mark.parametrize("name", SHAPES)
def test_the_logits_of_a_run_alone(lab, name):
    """Whatever is beside it, each request gets the logits of a run alone, to 1e-9 in float64."""
    rows, caches = dense.fleet(SHAPES[name])
    before = deepcopy(rows)
    logits = lab.fused_step(random_model(), rows, caches)
    assert_unchanged(rows, before)
    assert_alone(logits, rows)


@pytest.mark.parametrize("name", SHAPES)
def test_the_caches_of_a_run_alone(lab, name):
    """After the step every cache holds what a run alone stores, layer for layer, and no pad."""
    rows, caches = dense.fleet(SHAPES[name])
    lab.fused_step(random_model(), rows, caches)
    assert_caches_alone(caches, rows)


def test_one_model_call(lab):
    """Two decodes and three chunks are one call of the model, and so are 12 decodes and a chunk of 60."""
    for name in ("later chunks and decodes, in any order", "a long chunk, a long past and many decodes"):
        rows, caches = dense.fleet(SHAPES[name])
        calls = []
        # At the embedding, through which every call goes, model(...) and model.forward(...) alike.
        hook = random_model().embed_tokens.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        try:
            lab.fused_step(random_model(), rows, caches)
        finally:
            hook.remove()
        if len(calls) != 1:
            widest = max(row.num_tokens for row in rows)
            what = f"of {len(rows)} rows, the longest of {widest} new tokens"
            raise AssertionError(f"{len(calls)} calls of the model in one step {what}")


def test_a_partial_chunk_is_not_sampled(lab):
    """5 of 12 prompt tokens give no logits, those of the row below are its own; the other 7 go on and do."""
    request, cache = dense.mid_flight("long", 0, 12)
    beside, its_cache = dense.mid_flight("chat", 6, 1, outputs=1)
    caches = {"long": cache, "chat": its_cache}
    rows = [dense.row(request, 5), dense.row(beside, 1)]
    assert_alone(lab.fused_step(random_model(), rows, caches), rows)
    request.num_computed_tokens = 5
    rows = [dense.row(request, 7)]
    assert_alone(lab.fused_step(random_model(), rows, {"long": cache}), rows)


def test_a_step_that_samples_no_request(lab):
    """Nothing but partial chunks: the caches grow, and the result is empty."""
    request, cache = dense.mid_flight("long", 0, 12)
    logits = lab.fused_step(random_model(), [dense.row(request, 5)], {"long": cache})
    assert not logits, f"logits of {sorted(logits)}; no request is sampled in this step"
    assert logits == {}
    check_held({"long": cache}, [5])


def test_logits_are_asked_for_sampled_rows_only(lab):
    """model.logits gets the last hidden rows of those that are sampled: 3 of 5 rows here, of 19 tokens."""
    rows, caches = dense.fleet([(9, 1), (0, 12), (14, 1), (5, 8), (0, 4)])
    rows[1], rows[3] = dense.row(rows[1].request, 8), dense.row(rows[3].request, 5)
    asked = []
    hook = random_model().lm_head.register_forward_hook(
        lambda _, args, logits: asked.append(logits[..., 0].numel())
    )
    try:
        lab.fused_step(random_model(), rows, caches)
    finally:
        hook.remove()
    assert sum(asked) == 3, f"model.logits was asked for {sum(asked)} rows"


def test_a_refused_step_changes_nothing(lab):
    """The last of three rows has a stale cache: ValueError, and no cache and no request is changed."""
    rows, caches = dense.fleet([(9, 1), (0, 5), (6, 2)])
    rows[2].request.num_computed_tokens = 0
    rows[2] = dense.row(rows[2].request, 8)
    before, held = deepcopy(rows), stands(caches)
    with pytest.raises(ValueError, match="r2"):
        lab.fused_step(random_model(), rows, caches)
    assert_unchanged(rows, before)
    if stands(caches) != held:
        raise AssertionError("a refused step has changed a cache")


@pytest.mark.parametrize("layer", range(SMALL.num_hidden_layers))
def test_a_failed_pass_leaves_the_caches(lab, layer):
    """The model fails behind a layer: no layer of a cache has grown, and a second try is right."""
    rows, caches = dense.fleet([(9, 1), (0, 5), (6, 2)])
    before, layers = deepcopy(rows), range(SMALL.num_hidden_layers)
    with pytest.raises(OSError):
        lab.fused_step(dense.Failing(random_model(), layer), rows, caches)
    assert_unchanged(rows, before)
    for request, *_ in rows:
        held = {f"layer {n}": len(caches[request.request_id].get(n)[0]) for n in layers}
        assert held == dict.fromkeys(held, request.num_computed_tokens), f"the cache of {request.request_id}"
    assert_alone(lab.fused_step(random_model(), rows, caches), rows)
    assert_caches_alone(caches, rows)


def test_float32_stays_float32(lab):
    """Other models are in float32: there keys, values and logits are, too, and right to 1e-3."""
    rows, caches = dense.fleet([(9, 1), (0, 5)])
    for cache in caches.values():
        cache.k, cache.v = cache.k.float(), cache.v.float()
    logits = lab.fused_step(deepcopy(random_model()).float(), rows, caches)
    assert_alone(logits, rows, dtype=torch.float32, atol=1e-3)


def test_a_step_on_another_device(lab):
    """Model and caches on another device than the CPU: whatever your functions make is made there, too."""
    for name in ("later chunks and decodes, in any order", "several first chunks", "decodes only"):
        rows, caches = dense.fleet(SHAPES[name])
        move(caches)
        with elsewhere.Elsewhere():
            logits = lab.fused_step(elsewhere.model(random_model()), rows, caches)
        assert_alone({name: elsewhere.here(row) for name, row in logits.items()}, rows)


@pytest.mark.parametrize("name", SCENARIOS)
def test_whole_runs(lab, name):
    """Chunked, mixed, preempted: every text of a run through fused_step is the one of a run alone."""
    scenario = SCENARIOS[name]
    trace = scenarios.run(lab, scenario)
    assert_drained(trace)
    for request in scenario["requests"]:
        text = tokens_of(trace, request["id"])
        assert len(text) == request["max_tokens"]
        assert text == text_alone(request["id"], request["prompt"], request["max_tokens"])


def test_random_scripts(lab):
    """Random steps, one after the other, in any company: each request has what it would have alone."""
    judge_random_scripts("lab-04", lab)
