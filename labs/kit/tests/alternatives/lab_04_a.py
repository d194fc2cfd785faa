"""Another right lab-04: plain loops over rows and columns, and pads that see all they can."""

from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from mini_engine.model import sdpa


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
    pasts, news = past_lens.tolist(), num_new.tolist()
    p_max, t_max = max(pasts), max(news)

    def may_see(past, new, query, key):
        if query < t_max - new:
            return True  # a padded query: what it sees is nobody's business
        if key < p_max:
            return key >= p_max - past
        return t_max - new <= key - p_max <= query

    cells = [
        [[[may_see(p, n, t, c) for c in range(p_max + t_max)] for t in range(t_max)]]
        for p, n in zip(pasts, news, strict=True)
    ]
    return torch.tensor(cells, device=past_lens.device)


def assemble_fused_batch(rows, caches):
    width = max(n for _, n, _ in rows)
    device = next(iter(caches.values())).get(0)[0].device
    tokens, positions = torch.zeros(2, len(rows), width, dtype=torch.long, device=device)
    past_lens, num_new = torch.zeros(2, len(rows), dtype=torch.long, device=device)
    names, is_last = [], []
    for row, (request, n, _) in enumerate(rows):
        start = request.num_computed_tokens
        if len(caches[request.request_id]) != start:
            raise ValueError(
                f"{request.request_id}: {len(caches[request.request_id])} cached, {start} computed"
            )
        tokens[row, width - n :] = torch.tensor(request.token_ids(start, start + n))
        positions[row, width - n :] = torch.arange(start, start + n)
        past_lens[row], num_new[row] = start, n
        names.append(request.request_id)
        is_last.append(start + n == request.num_tokens)
    mask = fused_attention_mask(past_lens, num_new)
    return FusedBatch(names, tokens, positions, past_lens, num_new, mask, is_last)


def disassemble_fused_cache(batch, new_kv, caches):
    width = int(batch.num_new.max())
    real = torch.arange(width, device=batch.num_new.device) >= width - batch.num_new[:, None]
    for row, name in enumerate(batch.request_ids):
        for layer in range(len(new_kv)):
            caches[name].append(layer, *(x[row][real[row]] for x in new_kv[layer]))


def fused_step(model, rows, caches):
    batch = assemble_fused_batch(rows, caches)
    p_max = int(batch.past_lens.max())
    computed = {}

    def attend(layer, q, k, v):
        computed[layer] = (k, v)
        keys, values = (torch.cat((x.new_zeros(len(rows), p_max, *x.shape[2:]), x), dim=1) for x in (k, v))
        for row, name in enumerate(batch.request_ids):
            n = int(batch.past_lens[row])
            keys[row, p_max - n : p_max], values[row, p_max - n : p_max] = caches[name].get(layer)
        return sdpa(q, keys, values, batch.mask)

    hidden = model(batch.tokens, batch.positions, attend)[:, -1]
    disassemble_fused_cache(batch, [computed[layer] for layer in sorted(computed)], caches)
    names = [name for name, is_last in zip(batch.request_ids, batch.is_last, strict=True) if is_last]
    return dict(zip(names, model.logits(hidden[batch.is_last]), strict=True)) if names else {}
