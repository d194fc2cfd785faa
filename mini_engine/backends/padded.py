"""Many sequences in one forward pass, padded on the left to a rectangle.

lab-04 builds it. attention.py does the same without the padding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mini_engine.backends.dense import DenseCache
from mini_engine.interfaces import KVManager, Row
from mini_engine.model import CausalLM, sdpa
from mini_engine.request import Request
from mini_engine.schedule_step import next_chunk

pad_left = partial(pad_sequence, batch_first=True, padding_side="left")


@dataclass
class FusedBatch:
    """One step's rows as a rectangle, padded on the left: B requests, T_max new tokens each.

    tokens and positions are (B, T_max) int64, 0 where padded; past_lens and num_new (B,) count the
    real tokens; mask is `fused_attention_mask` of the two. `is_last` says which rows end their
    sequence and are sampled.
    """

    request_ids: list[str]
    tokens: Tensor
    positions: Tensor
    past_lens: Tensor
    num_new: Tensor
    mask: Tensor
    is_last: list[bool]


def fused_attention_mask(past_lens: Tensor, num_new: Tensor) -> Tensor:
    """Return the attention mask: bool (B, 1, T_max, P_max + T_max), True where attention is allowed.

    The P_max columns of the past come first; both parts are padded on the left, to the longest row.
    A padded query sees at least itself: a softmax over no key is NaN, and its NaN values reach the next
    layer, where even a weight of 0 times NaN is NaN.
    """
    p_max, t_max = int(past_lens.max()), int(num_new.max())
    past = torch.arange(p_max, device=past_lens.device) >= p_max - past_lens[:, None]  # (B, P_max)
    new = torch.arange(t_max, device=num_new.device) >= t_max - num_new[:, None]  # (B, T_max)
    real_keys = torch.cat((past, new), dim=1)[:, None, :]
    causal = torch.ones(t_max, p_max + t_max, dtype=torch.bool, device=past.device).tril(p_max)
    itself = torch.eye(t_max, dtype=torch.bool, device=past.device)
    mask = causal & real_keys
    mask[:, :, p_max:] |= itself
    return mask[:, None]


def assemble_fused_batch(rows: Sequence[Row], caches: Mapping[str, DenseCache]) -> FusedBatch:
    """Lay out the scheduled rows. Raises ValueError if a cache does not hold what is computed."""
    for request, _, _ in rows:
        held = len(caches[request.request_id])
        if held != request.num_computed_tokens:
            raise ValueError(
                f"the cache of request {request.request_id!r} holds {held} tokens, but "
                f"{request.num_computed_tokens} are computed; start an evicted request with an empty cache"
            )
    chunks = [next_chunk(row.request, row.num_tokens) for row in rows]
    ids = [row.request.request_id for row in rows]
    device = caches[ids[0]].k.device
    past_lens = torch.tensor([len(caches[request_id]) for request_id in ids], device=device)
    num_new = torch.tensor([len(chunk.token_ids) for chunk in chunks], device=device)
    tokens = pad_left([torch.tensor(chunk.token_ids) for chunk in chunks]).to(device)
    positions = pad_left([torch.tensor(chunk.positions) for chunk in chunks]).to(device)
    mask, is_last = fused_attention_mask(past_lens, num_new), [row.is_last for row in rows]
    return FusedBatch(ids, tokens, positions, past_lens, num_new, mask, is_last)


def disassemble_fused_cache(
    batch: FusedBatch, new_kv: list[tuple[Tensor, Tensor]], caches: Mapping[str, DenseCache]
) -> None:
    """Append each row's real keys and values to its cache, and nothing of the padding.

    `new_kv[layer]` is (k, v), each (B, T_max, num_kv_heads, head_dim).
    """
    for layer, (k, v) in enumerate(new_kv):
        for row, (request_id, n) in enumerate(zip(batch.request_ids, batch.num_new.tolist(), strict=True)):
            caches[request_id].append(layer, k[row, -n:], v[row, -n:])


def fused_step(model: CausalLM, rows: Sequence[Row], caches: Mapping[str, DenseCache]) -> dict[str, Tensor]:
    """Compute all rows in one model call, and extend `caches`.

    Return logits (vocab_size,) for each request whose chunk ends its sequence: with left padding
    they are in the last column of every row. A request with k drafts has (1 + k, vocab_size), the last ones.
    """
    batch = assemble_fused_batch(rows, caches)
    in_row = [caches[request_id] for request_id in batch.request_ids]
    new_kv: list[tuple[Tensor, Tensor]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new_kv.append((k, v))
        past_k, past_v = (pad_left(list(x)) for x in zip(*(c.get(layer) for c in in_row), strict=True))
        return sdpa(q, torch.cat((past_k, k), dim=1), torch.cat((past_v, v), dim=1), batch.mask)

    hidden = model(batch.tokens, batch.positions, attend)
    disassemble_fused_cache(batch, new_kv, caches)
    counts = {row.request.request_id: row.num_logits for row in rows if row.is_last}
    ends = [i for i, row in enumerate(rows) for _ in range(row.num_logits)]
    columns = [column for row in rows for column in range(-row.num_logits, 0)]
    parts = torch.split(model.logits(hidden[ends, columns]), list(counts.values())) if counts else ()
    return {name: part[0] if len(part) == 1 else part for name, part in zip(counts, parts, strict=True)}


class PaddedBackend:
    """The engine on `fused_step`: a drop-in for PagedBackend, padding and all.

    A request that is not in a step has finished or was preempted (every running one is in every
    step), so its cache is dropped. A subclass can have lab-04's `fused_step`. Raises ValueError with
    prefix caching on: dense caches share nothing.
    """

    name = "padded"
    fused_step = staticmethod(fused_step)

    def __init__(self, model: CausalLM, kv: KVManager, next_chunk: object = None):
        if kv.enable_prefix_caching:
            raise ValueError("PaddedBackend cannot share a cached prefix; set enable_prefix_caching=False")
        self.model = model
        self.caches: dict[str, DenseCache] = {}

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Compute the scheduled rows. Return logits (S, vocab_size) of the S that end their sequence."""
        model = self.model
        self.caches = {row.request.request_id: self._cache_of(row.request) for row in rows}
        logits = self.fused_step(model, rows, self.caches)
        ending = [row.request.request_id for row in rows if row.is_last]
        if not ending:
            return torch.empty(0, model.config.vocab_size, dtype=model.dtype, device=model.device)
        return torch.cat([logits[request_id].view(-1, model.config.vocab_size) for request_id in ending])

    def _cache_of(self, request: Request) -> DenseCache:
        if request.num_computed_tokens == 0:
            return DenseCache(self.model.config, self.model.dtype, self.model.device)
        if request.request_id not in self.caches:
            raise ValueError(
                f"request {request.request_id!r} was left out of a step and its cache is gone; "
                "PaddedBackend needs a scheduler that serves every running request in every step"
            )
        cache = self.caches[request.request_id]
        cache.truncate(request.num_computed_tokens)  # a step that failed may have appended to it
        return cache
