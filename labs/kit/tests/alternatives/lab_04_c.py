"""A fourth right lab-04: in inference mode, keys stored inside attend, and taken back if the model fails."""

from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from mini_engine.model import sdpa
from mini_engine.scheduler import next_chunk


@dataclass
class FusedBatch:  # given, and so is pad_left
    request_ids: list
    tokens: torch.Tensor
    positions: torch.Tensor
    past_lens: torch.Tensor
    num_new: torch.Tensor
    mask: torch.Tensor
    is_last: list


def pad_left(tensors):
    return pad_sequence(list(tensors), batch_first=True, padding_side="left")


def fused_attention_mask(past_lens, num_new):
    p_max, t_max = int(past_lens.max()), int(num_new.max())
    past, new = past_lens[:, None, None], num_new[:, None, None]
    column = torch.arange(p_max + t_max, device=past_lens.device)
    query = torch.arange(t_max, device=past_lens.device)[:, None]
    in_past = (column < p_max) & (column >= p_max - past)
    in_chunk = (column >= p_max + t_max - new) & (column <= p_max + query)
    # A pad sees the last column, which is somebody's real token in every row.
    return torch.where(query >= t_max - new, in_past | in_chunk, column == p_max + t_max - 1)[:, None]


@torch.inference_mode()
def assemble_fused_batch(rows, caches):
    stale = [
        (request.request_id, len(caches[request.request_id]), request.num_computed_tokens)
        for request, *_ in rows
        if len(caches[request.request_id]) != request.num_computed_tokens
    ]
    if stale:
        raise ValueError(f"stale caches, as (request, tokens held, tokens computed): {stale}")
    chunks = [next_chunk(*row[:2]) for row in rows]
    there = {"device": caches[rows[-1].request.request_id].get(0)[0].device}
    past_lens = torch.tensor([request.num_computed_tokens for request, *_ in rows], **there)
    num_new = torch.tensor([num_tokens for _, num_tokens, _ in rows], **there)
    width = int(num_new.max())
    padded = [[0] * (width - len(chunk.token_ids)) + list(chunk.token_ids) for chunk in chunks]
    tokens = torch.tensor(padded, **there)
    place = torch.arange(width, **there) - (width - num_new)[:, None]
    positions = (past_lens[:, None] + place).masked_fill(place < 0, 0)
    mask = fused_attention_mask(past_lens, num_new)
    is_last = [num_tokens == request.num_new_tokens for request, num_tokens, _ in rows]
    return FusedBatch(
        [request.request_id for request, *_ in rows], tokens, positions, past_lens, num_new, mask, is_last
    )


def disassemble_fused_cache(batch, new_kv, caches):
    real = (
        torch.arange(batch.tokens.shape[1], device=batch.num_new.device)
        >= batch.tokens.shape[1] - batch.num_new[:, None]
    )
    for layer, pair in enumerate(new_kv):
        rows = (x[real].split(batch.num_new.tolist()) for x in pair)
        for request_id, k, v in zip(batch.request_ids, *rows, strict=True):
            caches[request_id].append(layer, k, v)


@torch.inference_mode()
def fused_step(model, rows, caches):
    batch = assemble_fused_batch(rows, caches)

    def attend(layer, q, k, v):
        out = torch.zeros_like(q)
        for row, (request_id, n) in enumerate(zip(batch.request_ids, batch.num_new.tolist(), strict=True)):
            caches[request_id].append(layer, k[row, -n:], v[row, -n:])
            keys, values = caches[request_id].get(layer)
            mask = torch.ones(n, len(keys), dtype=torch.bool, device=q.device).tril(len(keys) - n)
            out[row, -n:] = sdpa(q[row : row + 1, -n:], keys[None], values[None], mask)[0]
        return out

    try:
        hidden = model(batch.tokens, batch.positions, attend)
    except BaseException:  # taken back: each layer has as many as before
        for request_id, past in zip(batch.request_ids, batch.past_lens.tolist(), strict=True):
            caches[request_id].truncate(past)
        raise
    return {
        request_id: model.logits(row[-1])
        for request_id, row, is_last in zip(batch.request_ids, hidden, batch.is_last, strict=True)
        if is_last
    }
