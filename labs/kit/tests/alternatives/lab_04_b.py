"""A third right lab-04: the mask out of positions in time, attention written by hand, row by row back."""

import torch

from mini_engine.backends.padded import FusedBatch, pad_left
from mini_engine.scheduler import next_chunk


def fused_attention_mask(past_lens, num_new):
    """A key is at a time relative to its row's first real token; pads are at negative times."""
    p_max, t_max = past_lens.max(), num_new.max()
    device = past_lens.device
    past_times = torch.arange(p_max, device=device) - (p_max - past_lens[:, None])
    new_times = torch.arange(t_max, device=device) - (t_max - num_new[:, None])
    # Pads of the new part come long before everything, so no query may be early enough for them.
    keys = torch.cat((past_times, torch.where(new_times < 0, -1, past_lens[:, None] + new_times)), dim=1)
    queries = past_lens[:, None] + new_times
    mask = (keys[:, None, :] >= 0) & (keys[:, None, :] <= queries[:, :, None])
    empty = ~mask.any(dim=-1)
    mask[..., -1] |= empty
    return mask.unsqueeze(1)


def assemble_fused_batch(rows, caches):
    held = [caches[request.request_id] for request, *_ in rows]
    columns = {name: [] for name in ("ids", "tokens", "positions", "past", "new", "last")}
    for request, num_tokens, _ in rows:
        past = len(caches[request.request_id])
        if past != request.num_computed_tokens:
            raise ValueError(
                f"{request.request_id} has computed {request.num_computed_tokens}, cached {past}"
            )
        token_ids, positions, is_last = next_chunk(request, num_tokens)
        values = (
            request.request_id,
            torch.tensor(token_ids),
            torch.tensor(positions),
            past,
            num_tokens,
            is_last,
        )
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
    device = held[0].get(0)[1].device
    past, new, tokens, positions = (
        x.to(device)
        for x in (
            torch.tensor(columns["past"]),
            torch.tensor(columns["new"]),
            pad_left(columns["tokens"]),
            pad_left(columns["positions"]),
        )
    )
    mask = fused_attention_mask(past, new)
    return FusedBatch(columns["ids"], tokens, positions, past, new, mask, columns["last"])


def disassemble_fused_cache(batch, new_kv, caches):
    for request_id, n, *rows in zip(
        batch.request_ids, batch.num_new, *(x for kv in new_kv for x in kv), strict=True
    ):
        for layer in range(len(new_kv)):
            k, v = rows[2 * layer : 2 * layer + 2]
            caches[request_id].append(layer, k[len(k) - n :], v[len(v) - n :])


def fused_step(model, rows, caches):
    batch = assemble_fused_batch(rows, caches)
    held = [caches[request_id] for request_id in batch.request_ids]
    new_kv = []

    def attend(layer, q, k, v):
        new_kv.append((k, v))
        k = torch.cat((pad_left([c.get(layer)[0] for c in held]), k), dim=1)
        v = torch.cat((pad_left([c.get(layer)[1] for c in held]), v), dim=1)
        group = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        scores = torch.einsum("bthd,bchd->bhtc", q, k) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~batch.mask, float("-inf")).softmax(dim=-1)
        return torch.einsum("bhtc,bchd->bthd", weights, v)

    hidden = model(batch.tokens, batch.positions, attend)
    disassemble_fused_cache(batch, new_kv, caches)
    return {
        request_id: model.logits(hidden[row, -1])
        for row, request_id in enumerate(batch.request_ids)
        if batch.is_last[row]
    }
