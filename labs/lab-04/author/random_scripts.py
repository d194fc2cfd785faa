"""Random scripts: requests arrive, compute in any company, are preempted, and lose or keep caches.

The caches are kept from step to step. `step` counts a request's tokens up as the scheduler does, and gives
it its next token where it was sampled. Keys are made up where a request arrives in the middle of its life.
"""

from copy import deepcopy
from functools import cache
from itertools import islice
from types import SimpleNamespace
from zlib import crc32

import torch

from labs.kit import Skip, load
from mini_engine.backends.dense import DenseCache
from mini_engine.interfaces import Row
from mini_engine.model import CausalLM, ModelConfig
from mini_engine.request import Request, SamplingParams

elsewhere = load("lab-04", "elsewhere")
SCRIPTS = 20
NAMES = ["a", "b", "c", "d", "e", "f", "g", "h"]
VOCAB = 11
CONFIG = ModelConfig("llama", VOCAB, 8, 8, 2, 2, 1, 4, 64, tie_word_embeddings=True)
WEIGHTS = torch.arange(
    1, CONFIG.head_dim + 1, dtype=torch.float64
).sqrt()  # of the elements of a key or value
TENSORS = ("tokens", "positions", "past_lens", "num_new", "mask")  # of a batch
DIGITS = 5  # behind the point, of what is shown


def draw(rng):
    longest = rng.choice((3, 6, 6, 12))
    calls, here = [], {}  # name: [tokens, computed]

    def arrives(name):
        prompt, outputs = rng.randint(1, longest), rng.choice((0, 0, 1, 1, 3))
        computed = rng.choice((0, 0, prompt + outputs - 1, rng.randint(0, prompt + outputs - 1)))
        here[name] = [prompt + outputs, computed]
        calls.append(["arrive", name, prompt, outputs, computed])

    def rows():
        """Some of the requests, in any order, with all that is left, a part of it, or a single token."""
        chosen = rng.sample(sorted(here), rng.choice((1, len(here), len(here), rng.randint(1, len(here)))))
        shares = {}
        for name in chosen:
            left = here[name][0] - here[name][1]
            shares[name] = rng.choice((left, left, 1, rng.randint(1, left)))
        return shares

    def computes(call, shares):
        calls.extend([["row", name, n] for name, n in shares.items()])
        calls.append([call])

    def steps(call="step"):
        shares = rows()
        computes(call, shares)
        for name, n in shares.items():
            here[name][1] += n
            here[name][0] += here[name][1] == here[name][0]

    def loses_or_keeps():
        """A preemption as it should be, or a cache that does not fit the counter, a step, and then a cure."""
        name = rng.choice(sorted(here))
        here[name][1] = 0
        kind = rng.choice(("preempt", "keep_cache", "lose_cache", "longer_cache"))
        calls.append([kind, name])
        if kind != "preempt":
            computes(rng.choice(("step", "step", "assemble")), rows() | {name: 1})
            calls.append(["preempt", name])

    def comes_again(name):
        """A request, and then another one of its name and its lengths; each takes the same step alone."""
        arrives(name)
        arrival, (tokens, computed) = calls[-1], here[name]
        n = rng.choice((tokens - computed, 1))
        computes("step", {name: n})
        calls.append(arrival)
        computes("step", {name: n})
        here[name] = [tokens + (computed + n == tokens), computed + n]

    def masks():
        count, any_past = rng.randint(1, 5), rng.random() < 0.7
        past_lens = [rng.choice((0, 1, rng.randint(0, 9))) * any_past for _ in range(count)]
        num_new = [rng.choice((1, 1, rng.randint(1, 5))) for _ in range(count)]
        calls.append(["fused_attention_mask", past_lens, num_new])

    for name in NAMES[: rng.choice((1, 2, 3, 4, 5, len(NAMES)))]:
        arrives(name)
    for _ in range(rng.randint(3, 6)):
        rng.choice((steps, steps, steps, steps, loses_or_keeps, masks))()
        if rng.random() < 0.3:
            computes("assemble", rows())
        if rng.random() < 0.2:
            steps("store")
        if rng.random() < 0.3:
            rng.choice((arrives, comes_again))(rng.choice(NAMES))
    dtype = rng.choice(("float64",) * 7 + ("float32",))
    if rng.random() < 0.15:  # seldom, as each of torch's operations is then ours
        masks()
        calls[-1][0] = "fused_attention_mask_on_another_device"
    if rng.random() < 0.15:
        computes("assemble_on_another_device", rows())
    return {"config": {"seed": rng.randint(0, 3), "dtype": dtype}, "calls": calls}


class Play:
    """The requests of a script and their caches, and what was done to them."""

    def __init__(self, part, config):
        self.part, self.dtype = part, getattr(torch, config["dtype"])
        self.net = toy(config["seed"], self.dtype)
        self.seed, self.arrived = config["seed"], 0  # a request whose name comes again has another prompt
        self.requests, self.caches = {}, {}
        self.rows = []  # of the step to come
        self.noted = False  # the last call was a row, which runs none of the part's code
        self.made = {}  # by the last call
        self.changed = {}  # by the last call, though it was only to be read
        self.given = {}  # what: what the last call gave of it, and how that looked then

    # ------------------------------------------------------------------------------------- calls

    def fused_attention_mask(self, past_lens, num_new):
        counts = torch.tensor(past_lens), torch.tensor(num_new)
        mask = self.part.fused_attention_mask(*counts)
        changed = [x.tolist() for x in counts] != [past_lens, num_new]
        self.made = self._kept("mask", lambda: pictures(mask, num_new))
        self.made |= {"the counts": "changed"} if changed else {}

    def fused_attention_mask_on_another_device(self, past_lens, num_new):
        """Each tensor that it makes must be made there, as on a GPU."""
        counts = [elsewhere.moved(torch.tensor(x)) for x in (past_lens, num_new)]
        with elsewhere.Elsewhere():
            mask = self.part.fused_attention_mask(*counts)
        self.made = pictures(elsewhere.here(mask), num_new)
        return lies_on(mask)

    def arrive(self, name, prompt, outputs, computed):
        """Another request of that name, `computed` of whose tokens are in its cache."""
        self.arrived += 1
        own = f"{name} {self.seed} {self.arrived}"
        tokens = [crc32(f"{own} {i}".encode()) % VOCAB for i in range(prompt + outputs)]
        request = Request(name, tokens[:prompt], SamplingParams(temperature=0))
        request.output_token_ids = tokens[prompt:]
        request.num_computed_tokens = computed
        self.requests[name], self.caches[name] = request, made_up(own, computed, self.dtype)

    def row(self, name, num_tokens):
        """A row of the step to come."""
        request = self._request(name)
        if num_tokens > request.num_new_tokens or any(row.request is request for row in self.rows):
            raise Skip
        self.rows.append(Row(request, num_tokens, num_tokens == request.num_new_tokens))
        self.noted = True

    def assemble(self):
        rows = self._rows()
        batch = self._watched(rows, lambda: self.part.assemble_fused_batch(rows, self.caches))
        self.made = self._kept("batch", lambda: said(batch))

    def assemble_on_another_device(self):
        """The caches lie there, and so should all of the batch."""
        rows = self._rows()
        caches = {name: deepcopy(store) for name, store in self.caches.items()}
        for store in caches.values():
            store.k, store.v = elsewhere.moved(store.k), elsewhere.moved(store.v)
        with elsewhere.Elsewhere():
            batch = self._watched(rows, lambda: self.part.assemble_fused_batch(rows, caches))
        tensors = {name: getattr(batch, name) for name in TENSORS}
        here = {name: elsewhere.here(x) for name, x in tensors.items()}
        self.made = said(SimpleNamespace(request_ids=batch.request_ids, is_last=batch.is_last, **here))
        return {name: lies_on(x) for name, x in tensors.items()}

    def store(self):
        """disassemble_fused_cache, with keys and values that are made up, those of the pads too."""
        rows = self._rows()
        if any(len(self.caches[row.request.request_id]) != row.request.num_computed_tokens for row in rows):
            raise Skip
        batch = self.part.assemble_fused_batch(rows, self.caches)
        shape = (len(rows), max(row.num_tokens for row in rows), CONFIG.num_key_value_heads, CONFIG.head_dim)
        new_kv = [
            tuple(noise(f"{what} {layer}", *shape).to(self.dtype) for what in ("keys", "values"))
            for layer in range(CONFIG.num_hidden_layers)
        ]
        before = said(batch), [x.tolist() for pair in new_kv for x in pair]
        self._watched(rows, lambda: self.part.disassemble_fused_cache(batch, new_kv, self.caches))
        self._count(rows)
        if (said(batch), [x.tolist() for pair in new_kv for x in pair]) != before:
            self.made = {"batch or new_kv": "changed"}

    def step(self):
        """fused_step; what the scheduler does behind it is done here. Returns which requests are sampled."""
        rows, calls, asked = self._rows(), [], []
        hooks = [
            self.net.embed_tokens.register_forward_hook(lambda *_: calls.append(1)),
            self.net.lm_head.register_forward_hook(lambda head, rows, logits: asked.append(logits.numel())),
        ]
        try:
            logits = self._watched(rows, lambda: self.part.fused_step(self.net, rows, self.caches))
        finally:
            for hook in hooks:
                hook.remove()
        self._count(rows)
        self.made = self._kept(
            "logits", lambda: {f"logits of {name}": [str(x.dtype), *rounded(x)] for name, x in logits.items()}
        )
        if len(calls) > 1 and not self.is_model:
            self.made["calls of the model"] = len(calls)
        if sum(asked) > VOCAB * sum(row.is_last for row in rows):
            self.made["rows of logits asked for"] = sum(asked) // VOCAB
        return sorted(logits)

    def preempt(self, name):
        """As it should be: nothing is computed, and the cache is empty."""
        self._request(name).num_computed_tokens = 0
        self.caches[name] = made_up(name, 0, self.dtype)

    def keep_cache(self, name):
        """A preemption that forgets the cache; a stale one, if anything was in it."""
        self._request(name).num_computed_tokens = 0

    def lose_cache(self, name):
        self._request(name)
        self.caches[name] = made_up(name, 0, self.dtype)

    def longer_cache(self, name):
        num_tokens = self._request(name).num_computed_tokens + 1
        self.caches[name] = made_up(name, num_tokens, self.dtype)

    # -------------------------------------------------------------------------------------- seen

    def seen(self):
        noted, self.noted = self.noted, False
        if noted:
            return {}
        texts = {n: [r.prompt_token_ids, r.output_token_ids] for n, r in self.requests.items()}
        seen = {
            "num_computed_tokens": {n: r.num_computed_tokens for n, r in self.requests.items()},
            "prompt and output": texts,
            "tokens in the cache": {n: self._tokens_in(n) for n in self.requests},
        }
        made, self.made = self.made | self.changed, {}
        self.changed = {}
        return made | seen | self._held()

    # ----------------------------------------------------------------------------------- helpers

    def _kept(self, what, look):
        """What a call gave, and whether what the call before it gave is still as it was."""
        now, (look_again, then) = look(), self.given.get(what, (dict, {}))
        changed = look_again() != then
        self.given[what] = look, now
        return now | ({f"the {what} of the call before": "changed"} if changed else {})

    def _tokens_in(self, name):
        return len(self.caches[name]) if name in self.caches else "its cache is gone"

    def _held(self):
        """A number for each entry of a cache, in which every element of it counts."""
        entries = {}
        for name in [name for name in self.requests if name in self.caches]:
            for layer in range(CONFIG.num_hidden_layers):
                keys, values = self.caches[name].get(layer)
                entries[f"{name}'s keys in layer {layer}"] = keys
                entries[f"{name}'s values in layer {layer}"] = values
        if not entries:
            return {}
        numbers = iter(rounded(torch.cat(list(entries.values())).flatten(1) @ WEIGHTS.to(self.dtype)))
        return {what: list(islice(numbers, held.shape[0])) for what, held in entries.items()}

    def _request(self, name):
        if name not in self.requests:
            raise Skip
        return self.requests[name]

    def _rows(self):
        """The rows of this step; what became of a request since its row was made may have outdated it."""
        rows, self.rows = self.rows, []
        rows = [
            row
            for row in rows
            if self.requests[row.request.request_id] is row.request
            and row.is_last == (row.num_tokens == row.request.num_new_tokens)
            and row.num_tokens <= row.request.num_new_tokens
        ]
        if not rows:
            raise Skip
        return rows

    def _watched(self, rows, call):
        """The list of rows is the schedule's own, and the requests are counted up by the scheduler."""
        before = self._only_read(rows)
        try:
            with torch.inference_mode():  # a part may use it; its caches would then not grow outside of it
                returned = call()
        except ValueError as error:  # or of a kind of its own, which is as right
            raise ValueError(*error.args).with_traceback(error.__traceback__) from None
        finally:
            after = self._only_read(rows)
            self.changed |= {what: "changed" for what, value in before.items() if after[what] != value}
        return returned

    def _only_read(self, rows):
        requests = {f"request {name}": fields(request) for name, request in self.requests.items()}
        return {"the rows": list(rows), "the names of the caches": sorted(self.caches)} | requests

    def _count(self, rows):
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


def fields(request):
    """All of a request, as it is now."""
    return {name: [*value] if isinstance(value, list) else value for name, value in vars(request).items()}


def pictures(mask, num_new):
    """Of a mask what its real queries see, x or ., and that its pads see something."""
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
    """Numbers as they are shown; of those in float32, which depend on the order of summation, how many."""
    if tensor.dtype == torch.float32:
        return [None] * len(tensor)
    return (tensor.round(decimals=DIGITS) + 0.0).tolist()
