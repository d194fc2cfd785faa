"""lab-04's contract, slow and plain: each request alone, token by token, with attention written out.

The random scripts compare a part with it. It knows no rectangle but in `assemble_fused_batch`, where
every cell is asked for by itself.
"""

import torch

from mini_engine.backends.padded import FusedBatch, pad_left

__all__ = ["FusedBatch", "pad_left"]  # given


def token_in(column, width, real):
    """Which of the `real` tokens stands in a column of a row that is padded on the left; None for a pad."""
    return column - (width - real) if column >= width - real else None


def fused_attention_mask(past_lens, num_new):
    device, past_lens, num_new = past_lens.device, past_lens.tolist(), num_new.tolist()
    p_max, t_max = max(past_lens), max(num_new)

    def sees(row, query, key):
        """Whether a column of the new tokens may look at a column of past and new ones."""
        asking = token_in(query, t_max, num_new[row])
        if asking is None:
            return key == p_max + query  # a pad: itself
        if key < p_max:
            return token_in(key, p_max, past_lens[row]) is not None
        asked = token_in(key - p_max, t_max, num_new[row])
        return asked is not None and asked <= asking

    return torch.tensor(
        [
            [[[sees(row, query, key) for key in range(p_max + t_max)] for query in range(t_max)]]
            for row in range(len(past_lens))
        ],
        device=device,
    )


def check(rows, caches):
    for request, _, _ in rows:
        computed, held = request.num_computed_tokens, len(caches[request.request_id])
        if computed != held:
            raise ValueError(f"{request.request_id}: {computed} tokens are computed, its cache holds {held}")


def text(request):
    return [*request.prompt_token_ids, *request.output_token_ids]


def assemble_fused_batch(rows, caches):
    check(rows, caches)
    width = max(num_tokens for _, num_tokens, _ in rows)
    tokens, positions = [[0] * width for _ in rows], [[0] * width for _ in rows]
    for row, (request, num_tokens, _) in enumerate(rows):
        for column in range(width):
            nth = token_in(column, width, num_tokens)
            if nth is not None:
                positions[row][column] = request.num_computed_tokens + nth
                tokens[row][column] = text(request)[request.num_computed_tokens + nth]
    device = caches[rows[0].request.request_id].get(0)[0].device
    past_lens = torch.tensor([request.num_computed_tokens for request, _, _ in rows], device=device)
    num_new = torch.tensor([num_tokens for _, num_tokens, _ in rows], device=device)
    return FusedBatch(
        [request.request_id for request, _, _ in rows],
        torch.tensor(tokens, device=device),
        torch.tensor(positions, device=device),
        past_lens,
        num_new,
        fused_attention_mask(past_lens, num_new),
        [request.num_computed_tokens + n == len(text(request)) for request, n, _ in rows],
    )


def disassemble_fused_cache(batch, new_kv, caches):
    width = int(batch.num_new.max())
    for row, request_id in enumerate(batch.request_ids):
        for column in range(width):
            if token_in(column, width, int(batch.num_new[row])) is not None:
                for layer, (k, v) in enumerate(new_kv):
                    caches[request_id].append(layer, k[row, column][None], v[row, column][None])


def fused_step(model, rows, caches):
    check(rows, caches)
    try:
        return one_by_one(model, rows, caches)
    except OSError:  # of the model: nothing has happened
        for request, _, _ in rows:
            caches[request.request_id].truncate(request.num_computed_tokens)
        raise


def one_by_one(model, rows, caches):
    logits = {}
    for request, num_tokens, _ in rows:
        cache = caches[request.request_id]
        for _ in range(num_tokens):
            position = len(cache)
            token = text(request)[position]
            hidden = model(torch.tensor([token]), torch.tensor([position]), attend_alone(cache))
        if len(cache) == len(text(request)):
            logits[request.request_id] = model.logits(hidden[0])
    return logits


def attend_alone(cache):
    """`attend` of one token: it is stored, and sees all that is stored."""

    def attend(layer, q, k, v):
        cache.append(layer, k, v)
        keys, values = cache.get(layer)
        shared = q.shape[1] // keys.shape[1]  # heads that share a pair of key and value
        heads = []
        for head in range(q.shape[1]):
            scores = keys[:, head // shared] @ q[0, head] / q.shape[-1] ** 0.5
            weights = torch.exp(scores - scores.max())
            heads.append(weights / weights.sum() @ values[:, head // shared])
        return torch.stack(heads)[None]

    return attend
