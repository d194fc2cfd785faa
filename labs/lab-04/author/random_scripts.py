"""Random scripts: requests arrive, compute in any company, are preempted, and lose or keep caches.

The caches are kept from step to step. `step` counts a request's tokens up as the scheduler does, and gives
it its next token where it was sampled. Keys are made up where a request arrives in the middle of its life.
"""

from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from itertools import islice
from types import SimpleNamespace
from zlib import crc32

import torch

from labs.kit import Skip, load
from labs.kit.tensor_toys import elsewhere
from labs.kit.toys.plays import Play as Base
from mini_engine.backends.dense import DenseCache
from mini_engine.interfaces import Row
from mini_engine.model import CausalLM, ModelConfig
from mini_engine.request import Request, SamplingParams

SCRIPTS = 24
scenarios = load("lab-04", "scenarios")
NAMES = ["a", "b", "A", "aa", "aab", "é", "a ", "0"]  # some differ by little
EDGES = [0, 1, *(2**bits + more for bits in (12, 16, 20, 24, 31, 32, 53) for more in (-1, 0, 1))]
VOCAB = 11
CONFIG = ModelConfig("llama", VOCAB, 8, 8, 3, 2, 1, 4, 64, tie_word_embeddings=True)
WEIGHTS = torch.arange(1, CONFIG.head_dim + 1, dtype=torch.float64).sqrt()  # of a key's or value's elements
TENSORS = ("tokens", "positions", "past_lens", "num_new", "mask")  # of a batch
DIGITS = 5  # behind the point, of what is shown


def draw(rng):
    longest = rng.choice((3, 6, 6, 12))
    calls, here = [], {}  # name: [tokens, computed]

    def arrives(name):
        prompt, outputs = rng.randint(1, longest), rng.choice((0, 0, 1, 3, 5))
        last = prompt + outputs - 1
        computed = rng.choice((0, 0, last, rng.randint(0, last), rng.randint(min(prompt, last), last)))
        here[name] = [prompt + outputs, computed]
        calls.append(["arrive", name, prompt, outputs, computed])

    def rows():
        """Some of the requests, in any order, with all that is left, a part of it, or a single token."""
        chosen = rng.sample(sorted(here), rng.choice((1, len(here), len(here), rng.randint(1, len(here)))))
        left = {name: here[name][0] - here[name][1] for name in chosen}
        return {name: rng.choice((n, n, 1, rng.randint(1, n))) for name, n in left.items()}

    def steps(call="step", shares=None):
        shares = shares or rows()
        calls.append([call, shares])
        for name, n in shares.items():
            here[name][1] += n
            here[name][0] += here[name][1] == here[name][0]

    def loses_or_keeps():
        """A preemption as it should be, or a cache that does not fit the counter, a step, and then a cure."""
        kinds = ("preempt", "keep_cache", "lose_cache", "longer_cache", "shorter_cache")
        name, kind = rng.choice(sorted(here)), rng.choice(kinds)
        here[name][1] = 0
        calls.append([kind, name])
        if kind != "preempt":
            calls.append([rng.choice(("step", "step", "assemble")), rows() | {name: 1}])
            calls.append(["preempt", name])

    def comes_again():
        """A request, and then another one of its name and its lengths; each takes the same step alone."""
        name = rng.choice(NAMES)
        arrives(name)
        arrival, (tokens, computed) = calls[-1], here[name]
        shares = {name: rng.choice((tokens - computed, 1))}
        calls.extend([["step", shares], arrival])
        here[name] = [tokens, computed]
        steps(shares=shares)

    def masks(*device):
        count, any_past = rng.choice((1, 2, 3, 4, 5, 5, 5, 70)), rng.random() < 0.7
        past_lens = [rng.choice((0, 1, rng.randint(0, 9))) * any_past for _ in range(count)]
        num_new = [rng.choice((1, 1, rng.randint(1, 5))) for _ in range(count)]
        calls.append(["fused_attention_mask", past_lens, num_new, *device])

    for name in NAMES[: rng.choice((1, 2, 3, 4, 5, len(NAMES)))]:
        arrives(name)
    for _ in range(rng.randint(3, 6)):
        rng.choice((steps, steps, steps, steps, loses_or_keeps, masks))()
        if rng.random() < 0.3:
            calls.append(["assemble", rows()])
        if rng.random() < 0.2:
            steps("store")
        if rng.random() < 0.2:
            calls.append(["fails", rows(), rng.randrange(CONFIG.num_hidden_layers)])
        if rng.random() < 0.3:
            rng.choice((lambda: arrives(rng.choice(NAMES)), comes_again))()
    dtype = rng.choice(("float64",) * 7 + ("float32", "bfloat16"))
    if rng.random() < 0.2:
        past = rng.choice((511, 1024, 4095, 4096, 4097, 2**15))
        num_new = [rng.randint(1, 2), 2 if past > 5000 else len(EDGES)]
        calls.append(["assemble_long", [past, rng.randint(0, 9)], num_new])
    if rng.random() < 0.15:  # seldom, as each of torch's operations is then ours
        masks("another device")
    if rng.random() < 0.15:
        calls.append(["assemble", rows(), "another device"])
    return {"config": {"seed": rng.randint(0, 3), "dtype": dtype}, "calls": calls}


class Play(Base):
    """The requests of a script and their caches, and what was done to them."""

    def __init__(self, part, config):
        super().__init__(part)
        self.dtype, self.seed = getattr(torch, config["dtype"]), config["seed"]
        self.net, self.caches = toy(self.seed, self.dtype), {}
        self.arrived = 0  # a request whose name comes again has another prompt
        self.made = {}  # by the last call

    # ------------------------------------------------------------------------------------- calls

    def fused_attention_mask(self, past_lens, num_new, device=""):
        """On another device each tensor that it makes must be made there, as on a GPU."""
        counts = [torch.tensor(past_lens), torch.tensor(num_new)]
        if device:
            with elsewhere.Elsewhere():
                mask = self.part.fused_attention_mask(*map(elsewhere.moved, counts))
            self.made = pictures(elsewhere.here(mask), num_new)
            return lies_on(mask)
        with self.only_reading(past_lens=counts[0], num_new=counts[1]):
            mask = self.part.fused_attention_mask(*counts)
        self.made = pictures(mask, num_new)
        self.lend("an earlier mask", mask)
        return None

    def arrive(self, name, prompt, outputs, computed):
        """Another request of that name, `computed` of whose tokens are in its cache."""
        self.arrived += 1
        own = f"{name} {self.seed} {self.arrived}"
        tokens = [crc32(f"{own} {i}".encode()) % VOCAB for i in range(prompt + outputs)]
        request = Request(name, tokens[:prompt], SamplingParams(temperature=0))
        request.output_token_ids = tokens[prompt:]
        request.num_computed_tokens = computed
        self.requests[name], self.caches[name] = request, made_up(own, computed, self.dtype)

    def assemble(self, shares, device=""):
        """On another device the caches lie there, and so should all of the batch."""
        rows, caches = self.rows(shares), self.caches
        if not device:
            with self.watched(rows):
                batch = self.part.assemble_fused_batch(rows, caches)
            self.made = said(batch)
            self.lend("an earlier batch", vars(batch))
            return None
        caches = deepcopy(caches)
        for store in caches.values():
            store.k, store.v = elsewhere.moved(store.k), elsewhere.moved(store.v)
        with elsewhere.Elsewhere(), self.watched(rows):
            batch = self.part.assemble_fused_batch(rows, caches)
        tensors = {name: getattr(batch, name) for name in TENSORS}
        here = {name: elsewhere.here(x) for name, x in tensors.items()}
        self.made = said(SimpleNamespace(request_ids=batch.request_ids, is_last=batch.is_last, **here))
        return {name: lies_on(x) for name, x in tensors.items()}

    def assemble_long(self, past_lens, num_new):
        """Rows of long sequences, whose token ids lie at the edges of the numbers of machines."""
        rows, caches = scenarios.long_rows(past_lens, num_new, EDGES)
        self.made = said(self.part.assemble_fused_batch(rows, caches))

    def store(self, shares):
        """disassemble_fused_cache, with keys and values that are made up, those of the pads too."""
        rows = self.rows(shares)
        if any(len(self.caches[row.request.request_id]) != row.request.num_computed_tokens for row in rows):
            raise Skip
        batch = self.part.assemble_fused_batch(rows, self.caches)
        shape = (len(rows), max(row.num_tokens for row in rows), CONFIG.num_key_value_heads, CONFIG.head_dim)
        new_kv = [
            tuple(noise(f"{what} {layer}", *shape).to(self.dtype) for what in ("keys", "values"))
            for layer in range(CONFIG.num_hidden_layers)
        ]
        with self.watched(rows), self.only_reading(batch=vars(batch), new_kv=new_kv):
            self.part.disassemble_fused_cache(batch, new_kv, self.caches)
        self.count(rows)

    def step(self, shares):
        """fused_step; what the scheduler does behind it is done here. Returns which requests are sampled."""
        rows, calls, asked = self.rows(shares), [], []
        hooks = [
            self.net.embed_tokens.register_forward_hook(lambda *_: calls.append(1)),
            self.net.lm_head.register_forward_hook(lambda head, rows, logits: asked.append(logits.numel())),
        ]
        try:
            with self.watched(rows):
                logits = self.part.fused_step(self.net, rows, self.caches)
        finally:
            for hook in hooks:
                hook.remove()
        self.count(rows)
        self.made = {f"logits of {name}": [str(x.dtype), *rounded(x)] for name, x in logits.items()}
        self.lend("earlier logits", logits)
        if len(calls) > 1 and not self.is_model:
            self.made["calls of the model"] = len(calls)
        if sum(asked) > VOCAB * sum(row.is_last for row in rows):
            self.made["rows of logits asked for"] = sum(asked) // VOCAB
        return sorted(logits)

    def fails(self, shares, layer):
        """A step in which the model fails behind the attention of a layer: no cache has grown."""
        rows = self.rows(shares)
        with self.watched(rows):
            self.part.fused_step(scenarios.Failing(self.net, layer), rows, self.caches)

    def preempt(self, name):
        """Preempt a request: nothing is computed, and the cache is empty."""
        self.keep_cache(name)
        self.lose_cache(name)

    def keep_cache(self, name):
        """A preemption that forgets the cache; a stale one, if anything was in it."""
        self.known(name).num_computed_tokens = 0

    def lose_cache(self, name):
        self.known(name)
        self.caches[name] = made_up(name, 0, self.dtype)

    def longer_cache(self, name, more=1):
        self.caches[name] = made_up(name, self.known(name).num_computed_tokens + more, self.dtype)

    def shorter_cache(self, name):
        """Something is in it, but not all that is computed."""
        if self.known(name).num_computed_tokens < 2:
            raise Skip
        self.longer_cache(name, -1)

    # -------------------------------------------------------------------------------------- seen

    def seen(self):
        """Return what was made, the requests, and each entry of a cache as one number."""
        made, self.made = self.made | {"changed, and only to be read": self.all_changed()}, {}
        stored = {}
        for name, r in self.requests.items():
            store = self.caches.get(name)
            held = "its cache is gone" if store is None else len(store)
            for field in ("num_computed_tokens", "prompt_token_ids", "output_token_ids"):
                made[f"{name}.{field}"] = getattr(r, field)
            made[f"num_tokens in {name}'s cache"] = held
            layers = range(0 if store is None else CONFIG.num_hidden_layers)
            for layer in layers if any(len(store.get(layer)[0]) for layer in layers) else ():
                for what, pairs in zip(("keys", "values"), store.get(layer), strict=True):
                    stored[f"{name}'s {what} in layer {layer}"] = pairs.flatten(1)
        if stored:  # one operation for all: they are many and small
            numbers = iter(rounded(torch.cat([*stored.values()]) @ WEIGHTS.to(self.dtype)))
            made |= {name: [*islice(numbers, len(entries))] for name, entries in stored.items()}
        return made

    # ----------------------------------------------------------------------------------- helpers

    def rows(self, shares):
        """The rows of a step, of those requests that are there and have so many tokens left."""
        known = {name: self.requests[name] for name in shares if name in self.requests}
        left = {name: request.num_new_tokens for name, request in known.items()}
        rows = [Row(known[name], n, n == left[name]) for name, n in shares.items() if n <= left.get(name, 0)]
        if not rows:
            raise Skip
        return rows

    @contextmanager
    def watched(self, rows):
        """The list of rows is the schedule's own, and the requests are counted up by the scheduler."""
        given = {"rows": rows, "caches": dict.fromkeys(self.caches)}
        try:
            # A part may use inference mode; its caches would then not grow outside of it.
            with torch.inference_mode(), self.only_reading(request=self.requests, **given):
                yield
        except ValueError as error:  # or of a kind of its own, which is as right
            raise ValueError(*error.args).with_traceback(error.__traceback__) from None

    def count(self, rows):
        for request, num_tokens, is_last in rows:
            request.num_computed_tokens += num_tokens
            if is_last:
                request.output_token_ids.append((7 * request.num_tokens + 3) % VOCAB)


@cache
def toy(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    net = Toy(CONFIG).double().requires_grad_(False)
    for _, parameter in sorted(net.named_parameters()):
        parameter.normal_(0.0, 0.5, generator=generator)
    return net.to(dtype)


class Toy(CausalLM):
    """A random model of attention and little else: a step of it takes a tenth of a millisecond or two."""

    def __init__(self, config):
        super().__init__(config)
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self.layers, self.norm = torch.nn.ModuleList(), torch.nn.Identity()
        shape = (config.num_hidden_layers, config.hidden_size, heads * config.head_dim)
        self.qkv = torch.nn.Parameter(torch.zeros(shape))
        self.turns = torch.nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, token_ids, positions, attend):
        x = self.embed_tokens(token_ids) + torch.sin(positions.unsqueeze(-1) * self.turns)
        heads, pairs = self.config.num_attention_heads, self.config.num_key_value_heads
        for layer, weight in enumerate(self.qkv):
            qkv = (x @ weight).unflatten(-1, (-1, self.config.head_dim))
            x = x + attend(layer, *qkv.split((heads, pairs, pairs), dim=-2)).flatten(-2)
        return x


def made_up(name, num_tokens, dtype):
    """A cache that holds so many tokens, with keys and values out of the air."""
    store = DenseCache(CONFIG, dtype)
    shape = (CONFIG.num_hidden_layers, 2, num_tokens, CONFIG.num_key_value_heads, CONFIG.head_dim)
    if num_tokens:
        for layer, pair in enumerate(noise(name, *shape)):
            store.append(layer, *pair)
    return store


def noise(seed, *shape):
    generator = torch.Generator().manual_seed(crc32(seed.encode()))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def pictures(mask, num_new):
    """Return what the real queries of a mask see, x or ., and whether its pads see something."""
    result = {"mask": [str(mask.dtype), list(mask.shape)]}
    for row, queries in enumerate(mask[:, 0].tolist()):
        lines = ["".join("x" if cell else "." for cell in line) for line in queries]
        pads = len(lines) - num_new[row]
        seen = ["something" if "x" in line else "nothing" for line in lines[:pads]]
        result |= {f"query {t} of row {row} sees": line for t, line in enumerate([*seen, *lines[pads:]])}
    return result


def lies_on(tensor):
    return "the other device" if elsewhere.is_elsewhere(tensor.device) else "the CPU"


def said(batch):
    """A batch as JSON."""
    tensors = {name: getattr(batch, name) for name in TENSORS[:4]}
    result = {"request_ids": list(batch.request_ids), "is_last": list(map(bool, batch.is_last))}
    result |= {name: [str(tensor.dtype), tensor.tolist()] for name, tensor in tensors.items()}
    return result | pictures(batch.mask, batch.num_new.tolist())


def rounded(tensor):
    """Numbers as they are shown; of those in fewer bits, which depend on the order of summation, how many."""
    if tensor.dtype != torch.float64:
        return [None] * len(tensor)
    return (tensor.round(decimals=DIGITS) + 0.0).tolist()
