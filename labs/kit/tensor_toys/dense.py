"""Requests with dense caches, made by hand in the middle of their lives, and small models. It needs torch.

The counterpart of paged.py: `alone` and `mid_flight` use random_model(), whose logits show a wrong key, and
the plays of random scripts `quick_model`, of which a step takes a tenth of a millisecond or two.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from labs.kit.tensor_toys.models import SMALL, random_model
from labs.kit.toys.plays import Play
from labs.kit.toys.requests import make_request
from labs.kit.toys.scripts import Skip
from mini_engine.backends.dense import DenseCache, dense_attend
from mini_engine.backends.padded import FusedBatch, pad_left
from mini_engine.interfaces import Attend, Row
from mini_engine.model import CausalLM, ModelConfig, sdpa
from mini_engine.request import Request, SamplingParams

Rows = list[Row]
Caches = dict[str, DenseCache]
VOCAB = 11
QUICK = ModelConfig("llama", VOCAB, 8, 8, 3, 2, 1, 4, 64, tie_word_embeddings=True)


# --------------------------------------------------------------------------- steps made by hand


def empty_cache() -> DenseCache:
    return DenseCache(SMALL, torch.float64)


def alone(token_ids: list[int]) -> tuple[Tensor, DenseCache]:
    """The logits behind the last token, and the cache, of a run alone in which nothing is cut."""
    logits, store = _alone(tuple(token_ids))
    return logits, deepcopy(store)


@cache
def _alone(token_ids: tuple[int, ...]) -> tuple[Tensor, DenseCache]:
    net, store = random_model(), empty_cache()
    hidden = net(torch.tensor(token_ids), torch.arange(len(token_ids)), dense_attend(store))
    return net.logits(hidden[-1]), store


def mid_flight(name: str, past: int, new: int, *, outputs: int = 0) -> tuple[Request, DenseCache]:
    """A request with `past` computed tokens and `new` left, and its cache; the last ones are outputs."""
    tokens = make_request(name, past + new).prompt_token_ids
    request = make_request(name, tokens[: len(tokens) - outputs])
    request.output_token_ids = tokens[len(tokens) - outputs :]
    request.num_computed_tokens = past
    return request, alone(tokens[:past])[1] if past else empty_cache()


def row(request: Request, num_tokens: int) -> Row:
    """The row of a request that computes so many tokens."""
    return Row(request, num_tokens, num_tokens == request.num_new_tokens)


def fleet(shapes: Sequence[tuple[int, int]]) -> tuple[Rows, Caches]:
    """Rows and caches of a step, from (tokens in the cache, new tokens); single tokens are decodes.

    Each request brings all that it has left. The order of the caches is not that of the rows.
    """
    rows, caches = [], {}
    for number, (past, new) in enumerate(shapes):
        outputs = 1 if past and new == 1 else 0
        request, caches[f"r{number}"] = mid_flight(f"r{number}", past, new, outputs=outputs)
        rows.append(row(request, new))
    return rows, dict(reversed(caches.items()))


def long_rows(past_lens: Sequence[int], num_new: Sequence[int], edges: list[int]) -> tuple[Rows, Caches]:
    """Rows and caches of long sequences: the ids of the tokens are `edges`, in turn; keys are zeros."""
    rows, caches = [], {}
    for number, (past, new) in enumerate(zip(past_lens, num_new, strict=True)):
        tokens = [edges[(number + place) % len(edges)] for place in range(past + new)]
        request = make_request(f"r{number}", tokens)
        request.num_computed_tokens = past
        rows.append(row(request, new))
        caches[request.request_id] = store = empty_cache()
        for layer in range(SMALL.num_hidden_layers):
            shape = (2, past, SMALL.num_key_value_heads, SMALL.head_dim)
            store.append(layer, *torch.zeros(shape, dtype=torch.float64))
    return rows, caches


class Failing:
    """A model that raises OSError behind the attention of one layer."""

    def __init__(self, net: CausalLM, layer: int):
        self.net, self.layer = net, layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.net, name)

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        def up_to_here(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = attend(layer, q, k, v)
            if layer == self.layer:
                raise OSError("the model fails")
            return out

        hidden: Tensor = self.net(token_ids, positions, up_to_here)
        return hidden


def logits_under(mask: Tensor, batch: FusedBatch, caches: Caches) -> Tensor:
    """The last column's logits (B, vocab_size) under a mask, whatever it says; stores nothing."""
    pasts, net = [caches[request_id] for request_id in batch.request_ids], random_model()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = (pad_left(list(x)) for x in zip(*(c.get(layer) for c in pasts), strict=True))
        k, v = (torch.cat(pair, dim=1) for pair in zip(past, (k, v), strict=True))
        return sdpa(q, k, v, mask)

    return net.logits(net(batch.tokens, batch.positions, attend)[:, -1])


class FusedModel:
    """The driver's model: a lab's `fused_step` once a step, the caches it needs, and the largest logit."""

    def __init__(self, lab: Any):
        self.lab, self.caches = lab, Caches()

    def forward(self, rows: Sequence[Any]) -> dict[str, list[int]]:
        """Rows of (request, token_ids, positions, sample); {request_id: [token]} of those that sample."""
        if not rows:
            return {}
        # A request that is not in the step has finished or was preempted; one that starts again starts empty.
        goes_on = {request.request_id: request.num_computed_tokens > 0 for request, *_ in rows}
        self.caches = {name: self.caches[name] if goes_on[name] else empty_cache() for name in goes_on}
        step = [row(request, len(token_ids)) for request, token_ids, *_ in rows]
        logits = self.lab.fused_step(random_model(), step, self.caches)
        if strangers := [name for name in logits if name not in self.caches]:
            raise AssertionError(f"fused_step returned logits under {strangers[0]!r}, which is no request_id")
        return {request_id: [int(scores.argmax())] for request_id, scores in logits.items()}


# --------------------------------------------------------------------- plays of random scripts


class QuickModel(CausalLM):
    """A random model of attention and little else."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self.layers = torch.nn.ModuleList()
        # Not the RMSNorm that mypy knows of: one that changes nothing keeps the numbers simple.
        self.norm = torch.nn.Identity()  # type: ignore[assignment]
        shape = (config.num_hidden_layers, config.hidden_size, heads * config.head_dim)
        self.qkv = torch.nn.Parameter(torch.zeros(shape))
        self.turns = torch.nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x: Tensor = self.embed_tokens(token_ids) + torch.sin(positions.unsqueeze(-1) * self.turns)
        heads, pairs = self.config.num_attention_heads, self.config.num_key_value_heads
        for layer, weight in enumerate(self.qkv):
            qkv = (x @ weight).unflatten(-1, (-1, self.config.head_dim))
            x = x + attend(layer, *qkv.split((heads, pairs, pairs), dim=-2)).flatten(-2)
        return x


@cache
def quick_model(seed: int, dtype: torch.dtype) -> QuickModel:
    generator = torch.Generator().manual_seed(seed)
    net = QuickModel(QUICK).double().requires_grad_(False)
    for _, parameter in sorted(net.named_parameters()):
        parameter.normal_(0.0, 0.5, generator=generator)
    return net.to(dtype)


def noise(name: str, *shape: int) -> Tensor:
    """Return random numbers in float64, the same for the same name."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class DensePlay(Play):
    """Requests of a script on a QuickModel, with their caches; keys are made up where a request arrives."""

    def __init__(self, part: Any, config: dict[str, Any]):
        super().__init__(part)
        self.dtype, self.seed = getattr(torch, config["dtype"]), config["seed"]
        self.net, self.caches = quick_model(self.seed, self.dtype), Caches()
        self.arrived = 0  # a request whose name comes again has another prompt

    def arrive(self, name: str, prompt: int, outputs: int, computed: int) -> None:
        """Another request of that name, `computed` of whose tokens are in its cache."""
        self.arrived += 1
        own = f"{name} {self.seed} {self.arrived}"
        tokens = [crc32(f"{own} {i}".encode()) % VOCAB for i in range(prompt + outputs)]
        request = Request(name, tokens[:prompt], SamplingParams(temperature=0))
        request.output_token_ids = tokens[prompt:]
        request.num_computed_tokens = computed
        self.requests[name], self.caches[name] = request, self.made_up(own, computed)

    def preempt(self, name: str) -> None:
        """Preempt a request: nothing is computed, and the cache is empty."""
        self.keep_cache(name)
        self.lose_cache(name)

    def keep_cache(self, name: str) -> None:
        """A preemption that forgets the cache; a stale one, if anything was in it."""
        self.known(name).num_computed_tokens = 0

    def lose_cache(self, name: str) -> None:
        self.known(name)
        self.caches[name] = self.made_up(name, 0)

    def longer_cache(self, name: str, more: int = 1) -> None:
        self.caches[name] = self.made_up(name, self.known(name).num_computed_tokens + more)

    def shorter_cache(self, name: str) -> None:
        """Something is in it, but not all that is computed."""
        if self.known(name).num_computed_tokens < 2:
            raise Skip
        self.longer_cache(name, -1)

    def made_up(self, name: str, num_tokens: int) -> DenseCache:
        """A cache that holds so many tokens, with keys and values out of the air."""
        store = DenseCache(QUICK, self.dtype)
        shape = (QUICK.num_hidden_layers, 2, num_tokens, QUICK.num_key_value_heads, QUICK.head_dim)
        if num_tokens:
            for layer, pair in enumerate(noise(name, *shape)):
                store.append(layer, *pair)
        return store

    def rows(self, shares: dict[str, int]) -> Rows:
        """The rows of a step, of those requests that are there and have so many tokens left."""
        known = {name: self.requests[name] for name in shares if name in self.requests}
        rows = [row(known[name], n) for name, n in shares.items() if name in known]
        rows = [one for one in rows if one.num_tokens <= one.request.num_new_tokens]
        if not rows:
            raise Skip
        return rows

    @contextmanager
    def watched(self, rows: Rows) -> Iterator[None]:
        """The list of rows is the schedule's own, and the requests are counted up by the scheduler."""
        given = {"rows": rows, "caches": dict.fromkeys(self.caches)}
        try:
            # A part may use inference mode; its caches would then not grow outside of it.
            with torch.inference_mode(), self.only_reading(request=self.requests, **given):
                yield
        except ValueError as error:  # or of a kind of its own, which is as right
            raise ValueError(*error.args).with_traceback(error.__traceback__) from None

    def count(self, rows: Rows) -> None:
        """Count the rows' tokens as computed, and give each request that was sampled its next one."""
        for request, num_tokens, is_last in rows:
            request.num_computed_tokens += num_tokens
            if is_last:
                request.output_token_ids.append((7 * request.num_tokens + 3) % VOCAB)
