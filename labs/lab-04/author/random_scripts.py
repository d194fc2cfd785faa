"""Random scripts: requests arrive, compute in any company, are preempted, and lose or keep caches.

The caches are kept from step to step. `step` counts a request's tokens up as the scheduler does, and gives
it its next token where it was sampled. Keys are made up where a request arrives in the middle of its life.
"""

from contextlib import nullcontext
from copy import deepcopy
from itertools import islice

import torch

from labs.kit import Skip
from labs.kit.tensor_toys import elsewhere
from labs.kit.tensor_toys.dense import QUICK, VOCAB, DensePlay, Failing, long_rows, noise

SCRIPTS = 24
NAMES = ["a", "b", "A", "aa", "aab", "é", "a ", "0"]  # some differ by little
EDGES = [0, 1, *(2**bits + more for bits in (12, 16, 20, 24, 31, 32, 53) for more in (-1, 0, 1))]
WEIGHTS = torch.arange(1, QUICK.head_dim + 1, dtype=torch.float64).sqrt()  # of a key's or value's elements
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
            calls.append(["fails", rows(), rng.randrange(QUICK.num_hidden_layers)])
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


class Play(DensePlay):
    """The requests of a script and their caches, and what was done to them."""

    made = {}  # by the last call

    def fused_attention_mask(self, past_lens, num_new, device=""):
        """On another device each tensor that it makes must be made there, as on a GPU."""
        counts = [torch.tensor(past_lens), torch.tensor(num_new)]
        given = map(elsewhere.moved, counts) if device else counts
        there = elsewhere.Elsewhere() if device else nullcontext()
        with self.only_reading(past_lens=counts[0], num_new=counts[1]), there:
            mask = self.part.fused_attention_mask(*given)
        self.made = pictures(elsewhere.here(mask), num_new)
        if device:
            return lies_on(mask)
        self.lend("an earlier mask", mask)
        return None

    def assemble(self, shares, device=""):
        """On another device the caches lie there, and so should all of the batch."""
        rows, caches = self.rows(shares), self.caches
        if device:
            caches = deepcopy(caches)
            for store in caches.values():
                store.k, store.v = elsewhere.moved(store.k), elsewhere.moved(store.v)
        with elsewhere.Elsewhere() if device else nullcontext(), self.watched(rows):
            batch = self.part.assemble_fused_batch(rows, caches)
        self.made = said(batch)
        if device:
            return {name: lies_on(getattr(batch, name)) for name in TENSORS}
        self.lend("an earlier batch", vars(batch))
        return None

    def assemble_long(self, past_lens, num_new):
        """Rows of long sequences, whose token ids lie at the edges of the numbers of machines."""
        self.made = said(self.part.assemble_fused_batch(*long_rows(past_lens, num_new, EDGES)))

    def store(self, shares):
        """disassemble_fused_cache, with keys and values that are made up, those of the pads too."""
        rows = self.rows(shares)
        if any(len(self.caches[row.request.request_id]) != row.request.num_computed_tokens for row in rows):
            raise Skip
        batch = self.part.assemble_fused_batch(rows, self.caches)
        shape = (len(rows), max(row.num_tokens for row in rows), QUICK.num_key_value_heads, QUICK.head_dim)
        new_kv = [
            tuple(noise(f"{what} {layer}", *shape).to(self.dtype) for what in ("keys", "values"))
            for layer in range(QUICK.num_hidden_layers)
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
        if len(calls) > 1 and not self.is_oracle:
            self.made["calls of the model"] = len(calls)
        if sum(asked) > VOCAB * sum(row.is_last for row in rows):
            self.made["rows of logits asked for"] = sum(asked) // VOCAB
        return sorted(logits)

    def fails(self, shares, layer):
        """A step in which the model fails behind the attention of a layer: no cache has grown."""
        rows = self.rows(shares)
        with self.watched(rows):
            self.part.fused_step(Failing(self.net, layer), rows, self.caches)

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
            layers = range(0 if store is None else QUICK.num_hidden_layers)
            for layer in layers if any(len(store.get(layer)[0]) for layer in layers) else ():
                for what, pairs in zip(("keys", "values"), store.get(layer), strict=True):
                    stored[f"{name}'s {what} in layer {layer}"] = pairs.flatten(1)
        if stored:  # one operation for all: they are many and small
            numbers = iter(rounded(torch.cat([*stored.values()]) @ WEIGHTS.to(self.dtype)))
            made |= {name: [*islice(numbers, len(entries))] for name, entries in stored.items()}
        return made


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
    """A batch as JSON, whichever device it is on."""
    tensors = {name: elsewhere.here(getattr(batch, name)) for name in TENSORS}
    mask, num_new = tensors.pop("mask"), tensors["num_new"].tolist()
    result = {"request_ids": list(batch.request_ids), "is_last": list(map(bool, batch.is_last))}
    result |= {name: [str(tensor.dtype), tensor.tolist()] for name, tensor in tensors.items()}
    return result | pictures(mask, num_new)


def rounded(tensor):
    """Numbers as they are shown; of those in fewer bits, which depend on the order of summation, how many."""
    if tensor.dtype != torch.float64:
        return [None] * len(tensor)
    return (tensor.round(decimals=DIGITS) + 0.0).tolist()
