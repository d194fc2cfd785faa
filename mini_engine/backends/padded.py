"""Attention over one contiguous cache a sequence: the reference, and the padded fused batch.

`dense_attend` serves one sequence. `fused_step` serves many in one forward pass by padding them to
a rectangle on the left; it is what lab-04 builds, and the foil to paged_attention.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mini_engine.model import Attend, CausalLM, ModelConfig, sdpa
from mini_engine.request import Request
from mini_engine.scheduler import next_chunk

Rows = list[tuple[Request, int]]  # (request, number of tokens), in schedule order

pad_left = partial(pad_sequence, batch_first=True, padding_side="left")


class DenseCache:
    """The keys and values of one sequence, all layers; `len(cache)` tokens of them.

    The capacity doubles when it runs out: concatenating at every token would copy the whole past
    each time.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32, device="cpu"):
        shape = (config.num_hidden_layers, 16, config.num_key_value_heads, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self._lens = [0] * config.num_hidden_layers

    def __len__(self) -> int:
        return self._lens[-1]

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k and v (n, num_kv_heads, head_dim) behind what the layer holds."""
        start, end = self._lens[layer], self._lens[layer] + len(k)
        while end > self.k.shape[1]:
            self.k, self.v = (torch.cat((x, torch.zeros_like(x)), dim=1) for x in (self.k, self.v))
        self.k[layer, start:end], self.v[layer, start:end] = k, v
        self._lens[layer] = end

    def get(self, layer: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and values so far, (n, num_kv_heads, head_dim) each; views, not copies."""
        n = self._lens[layer]
        return self.k[layer, :n], self.v[layer, :n]


def dense_attend(cache: DenseCache) -> Attend:
    """`attend` for one sequence: its new rows, (T, heads, head_dim), see the past and themselves."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.append(layer, k, v)
        k, v = cache.get(layer)
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        return sdpa(q[None], k[None], v[None], mask)[0]

    return attend


# ------------------------------------------------------------------------------ many, padded left


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
    """Who may look at whom: bool (B, 1, T_max, P_max + T_max), True where attention is allowed.

    The P_max columns of the past come first; both parts are padded on the left, to the longest row.
    A padded query sees itself at least: a row without any key is NaN in a softmax written by hand,
    and its NaN values reach the next layer, where even a weight of 0 times NaN is NaN.
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


def assemble_fused_batch(
    rows: Rows,
    caches: dict[str, DenseCache],
    *,
    next_chunk: Callable = next_chunk,
    fused_attention_mask: Callable[[Tensor, Tensor], Tensor] = fused_attention_mask,
) -> FusedBatch:
    """Lay out the scheduled rows. Raises ValueError if a cache does not hold what is computed."""
    for request, _ in rows:
        held = len(caches[request.request_id])
        if held != request.num_computed_tokens:
            raise ValueError(
                f"the cache of request {request.request_id!r} holds {held} tokens, but "
                f"{request.num_computed_tokens} are computed; start an evicted request with an empty cache"
            )
    chunks = [next_chunk(request, num_tokens) for request, num_tokens in rows]
    device = caches[rows[0][0].request_id].k.device
    past_lens = torch.tensor([len(caches[request.request_id]) for request, _ in rows], device=device)
    num_new = torch.tensor([len(chunk.token_ids) for chunk in chunks], device=device)
    return FusedBatch(
        [request.request_id for request, _ in rows],
        pad_left([torch.tensor(chunk.token_ids) for chunk in chunks]).to(device),
        pad_left([torch.tensor(chunk.positions) for chunk in chunks]).to(device),
        past_lens,
        num_new,
        fused_attention_mask(past_lens, num_new),
        [chunk.is_last for chunk in chunks],
    )


def disassemble_fused_cache(
    batch: FusedBatch, new_kv: list[tuple[Tensor, Tensor]], caches: dict[str, DenseCache]
) -> None:
    """Append each row's real keys and values to its cache, and nothing of the padding.

    `new_kv` has a layer's (k, v) at its index, each (B, T_max, num_kv_heads, head_dim).
    """
    for layer, (k, v) in enumerate(new_kv):
        for row, (request_id, n) in enumerate(zip(batch.request_ids, batch.num_new.tolist(), strict=True)):
            caches[request_id].append(layer, k[row, -n:], v[row, -n:])


def fused_step(
    model: CausalLM,
    rows: Rows,
    caches: dict[str, DenseCache],
    *,
    assemble_fused_batch: Callable = assemble_fused_batch,
    disassemble_fused_cache: Callable = disassemble_fused_cache,
) -> dict[str, Tensor]:
    """Compute all rows in exactly one model call; extends `caches`.

    Returns logits (vocab_size,) for each request whose chunk ends its sequence: with left padding
    they are in the last column of every row.
    """
    batch = assemble_fused_batch(rows, caches)
    in_row = [caches[request_id] for request_id in batch.request_ids]
    new_kv: list[tuple[Tensor, Tensor]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new_kv.append((k, v))
        past_k, past_v = (pad_left(x) for x in zip(*(c.get(layer) for c in in_row), strict=True))
        return sdpa(q, torch.cat((past_k, k), dim=1), torch.cat((past_v, v), dim=1), batch.mask)

    hidden = model(batch.tokens, batch.positions, attend)
    disassemble_fused_cache(batch, new_kv, caches)
    ends = [row for row, is_last in enumerate(batch.is_last) if is_last]
    logits = model.logits(hidden[ends, -1])
    return {batch.request_ids[row]: logits[i] for i, row in enumerate(ends)}


class PaddedBackend:
    """The engine on `fused_step`: a drop-in for PagedBackend, padding and all.

    A request that is not in a step has finished or lost its place (every running one is in every
    step), so its cache is dropped. Own versions of the four functions can be handed in. Raises
    ValueError with prefix caching on: dense caches share nothing.
    """

    def __init__(
        self,
        model: CausalLM,
        kv,
        *,
        next_chunk: Callable = next_chunk,
        fused_attention_mask: Callable | None = None,
        assemble_fused_batch: Callable | None = None,
        disassemble_fused_cache: Callable | None = None,
        fused_step: Callable | None = None,
    ):
        if getattr(kv, "enable_prefix_caching", False):
            raise ValueError("PaddedBackend cannot share a cached prefix; set enable_prefix_caching=False")
        self.model = model
        self.fused_step = fused_step or _fused_step_of(
            next_chunk, fused_attention_mask, assemble_fused_batch, disassemble_fused_cache
        )
        self.caches: dict[str, DenseCache] = {}

    def forward(self, rows: Rows) -> Tensor:
        """Compute the scheduled rows; logits (S, vocab_size) of the S that end their sequence."""
        model = self.model
        self.caches = {request.request_id: self._cache_of(request) for request, _ in rows}
        logits = self.fused_step(model, rows, self.caches)
        ending = [request.request_id for request, n in rows if n == request.num_new_tokens]
        if not ending:
            return torch.empty(0, model.config.vocab_size, dtype=model.dtype, device=model.device)
        return torch.stack([logits[request_id] for request_id in ending])

    def _cache_of(self, request: Request) -> DenseCache:
        if request.num_computed_tokens == 0:
            return DenseCache(self.model.config, self.model.dtype, self.model.device)
        if request.request_id not in self.caches:
            raise ValueError(
                f"request {request.request_id!r} was left out of a step and its cache is gone; "
                "PaddedBackend needs a scheduler that serves every running request in every step"
            )
        return self.caches[request.request_id]


def _fused_step_of(next_chunk, mask, assemble, disassemble) -> Callable:
    """Our `fused_step` around whichever of its three parts are given."""
    return partial(
        fused_step,
        assemble_fused_batch=assemble
        or partial(
            assemble_fused_batch,
            next_chunk=next_chunk,
            fused_attention_mask=mask or fused_attention_mask,
        ),
        disassemble_fused_cache=disassemble or disassemble_fused_cache,
    )
