"""lab-04, fused batch: your file.

Replace each NotImplementedError by code; the docstrings say what to do, README.md says why.
Check with: LAB_IMPL=starter pytest labs/lab-04     Stuck? python -m labs hint lab-04
"""

from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence


@dataclass
class FusedBatch:
    """Given: one step's rows as a rectangle, padded on the left; B requests, T_max new tokens each.

    tokens and positions are (B, T_max) int64, 0 where padded; past_lens and num_new are (B,) int64
    and count the real tokens; mask is `fused_attention_mask` of these two. is_last says which rows
    end their sequence and are sampled. Rows are in the order of the schedule.
    """

    request_ids: list[str]
    tokens: torch.Tensor
    positions: torch.Tensor
    past_lens: torch.Tensor
    num_new: torch.Tensor
    mask: torch.Tensor
    is_last: list[bool]


def pad_left(tensors) -> torch.Tensor:
    """Given: B tensors (n_i, ...) of different length as one (B, n_max, ...), zeros on the left."""
    return pad_sequence(list(tensors), batch_first=True, padding_side="left")


def fused_attention_mask(past_lens: torch.Tensor, num_new: torch.Tensor) -> torch.Tensor:
    """Which query may look at which key: bool (B, 1, T_max, P_max + T_max), True where attention is allowed.

    past_lens and num_new (B,) count each row's real tokens; P_max and T_max are their maxima. The
    columns are keys: P_max of the past, then T_max new ones. Both parts are padded on the left, so
    the real ones are the last past_lens[b] of the first part and the last num_new[b] of the second.
    Both are only read.

    1. A real query (one of the last num_new[b] of its row) sees every real key of its past, and the
       real new keys up to and including its own column.
    2. It sees no pad: not those of the past, and not those of the new tokens.
    3. A padded query must see at least one key, whichever it is; its own column will do. Its result
       is thrown away, but a softmax over nothing is NaN, and that does not stay where it is.
    4. The dimension of size 1 is there for the heads: one mask serves them all.
    5. Make every tensor on the device of those that you are given (device=past_lens.device): on a
       GPU one that is left on the CPU does not go with the others.
    """
    raise NotImplementedError("lab-04: fused_attention_mask is not written yet")


def assemble_fused_batch(rows, caches) -> FusedBatch:
    """Lay out one step: all its rows in one rectangle, each padded on the left.

    rows: list of Row, in schedule order: decodes, prefill chunks, in any mixture. A row has request,
    num_tokens, and is_last: whether its chunk ends the sequence, so that it is sampled.
    caches: {request_id: cache}; len(cache) is the number of tokens whose keys and values it holds.
    Both are only read, and so are the requests.

    1. A cache must hold exactly request.num_computed_tokens tokens. If not (a preempted request
       with its old cache), raise a ValueError that names the request and both numbers.
    2. `mini_engine.scheduler.next_chunk(request, num_tokens)`, lab-02's, gives the row's token_ids and
       their absolute positions.
    3. Pad tokens and positions on the left, to the longest row. past_lens comes from the caches.
    4. The mask is your fused_attention_mask. Keep the order of the rows, and the list `rows` as it is.
    5. All tensors of the batch lie on the caches' device, which cache.get(0)[0].device names.
    """
    raise NotImplementedError("lab-04: assemble_fused_batch is not written yet")


def disassemble_fused_cache(batch, new_kv, caches) -> None:
    """Give each request the keys and values of its real new tokens, and nothing of the padding.

    new_kv: a list with one (k, v) a layer, each (B, T_max, num_kv_heads, head_dim).
    caches: {request_id: cache}; cache.append(layer, k, v) stores k and v (n, num_kv_heads,
    head_dim) behind what that layer holds already.

    Row b belongs to batch.request_ids[b]; its real tokens are the last batch.num_new[b] columns. batch and
    new_kv are only read.
    """
    raise NotImplementedError("lab-04: disassemble_fused_cache is not written yet")


def fused_step(model, rows, caches) -> dict[str, torch.Tensor]:
    """Compute all rows in exactly one model call, extend `caches`, and return the logits to sample.

    The result has logits (vocab_size,) for each request whose chunk ends its sequence, and no entry
    for the others: there is nothing to sample in the middle of a prompt.

    1. Assemble.
    2. Write `attend(layer, q, k, v)`: q is (B, T_max, num_heads, head_dim), k and v the same with
       num_kv_heads, RoPE applied. Keep (k, v) for later. Put each row's past before them:
       cache.get(layer) gives the past k and v, (n, num_kv_heads, head_dim) each; pad them on the
       left, like the rows. `mini_engine.model.sdpa(q, k, v, mask)` attends, and has q's shape.
    3. hidden = model(batch.tokens, batch.positions, attend), (B, T_max, hidden_size): once.
    4. Disassemble.
    5. model.logits(hidden rows) gives logits (..., vocab_size). With left padding, every row's last
       token is in the last column. Ask for those rows only that are sampled: it is the widest matrix.

    A refused step changes nothing, and one in which the model fails leaves every layer of every cache as
    it was: the scheduler tries it again. The requests are only read: num_computed_tokens is counted up by
    the scheduler, behind you.
    """
    raise NotImplementedError("lab-04: fused_step is not written yet")
