"""Workloads of races, each with other demands on an engine.

Prompts are random tokens, drawn from a seed, so that a workload is the same on every machine. `code` and
`story` are text.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from mini_engine.text.tokenizer import Tokenizer


@dataclass
class Workload:
    """Prompts as token ids, and for each how many tokens to put out."""

    prompts: list[list[int]]
    num_outputs: list[int]

    @classmethod
    def mixed(cls, vocab_size: int, num_prompts: int = 32, seed: int = 0) -> "Workload":
        """Prompts of 16 to 256 random tokens, outputs of 16, 32, 64 or 128."""
        rng = random.Random(seed)
        prompts = [_tokens(rng, vocab_size, rng.randint(16, 256)) for _ in range(num_prompts)]
        return cls(prompts, [rng.choice((16, 32, 64, 128)) for _ in prompts])

    @classmethod
    def skewed(cls, vocab_size: int, num_prompts: int = 32, seed: int = 0) -> "Workload":
        """One output of 500 tokens among outputs of 10 to 40; prompts of 16 to 128."""
        rng = random.Random(seed)
        prompts = [_tokens(rng, vocab_size, rng.randint(16, 128)) for _ in range(num_prompts)]
        num_outputs = [rng.randint(10, 40) for _ in prompts]
        num_outputs[rng.randrange(num_prompts)] = 500
        return cls(prompts, num_outputs)

    @classmethod
    def shared_prefix(cls, vocab_size: int, num_prompts: int = 32, seed: int = 0) -> "Workload":
        """Prompts that begin with the same 512 tokens and end with 8 to 64 of their own, 32 out."""
        rng = random.Random(seed)
        prefix = _tokens(rng, vocab_size, 512)
        prompts = [prefix + _tokens(rng, vocab_size, rng.randint(8, 64)) for _ in range(num_prompts)]
        return cls(prompts, [32] * num_prompts)

    @classmethod
    def single(cls, vocab_size: int, num_prompts: int = 1, seed: int = 0) -> "Workload":
        """One request: a prompt of 32 tokens, 128 out."""
        rng = random.Random(seed)
        return cls([_tokens(rng, vocab_size, 32) for _ in range(num_prompts)], [128] * num_prompts)

    @classmethod
    def long(cls, vocab_size: int, num_prompts: int = 4, seed: int = 0) -> "Workload":
        """Four prompts of 2,000 tokens, 64 out."""
        rng = random.Random(seed)
        return cls([_tokens(rng, vocab_size, 2000) for _ in range(num_prompts)], [64] * num_prompts)

    @classmethod
    def throughput(cls, vocab_size: int, num_prompts: int = 256, seed: int = 0) -> "Workload":
        """Prompts and outputs of 100 to 1,024 tokens, as in nano-vLLM's benchmark."""
        rng = random.Random(seed)
        prompts = [_tokens(rng, vocab_size, rng.randint(100, 1024)) for _ in range(num_prompts)]
        return cls(prompts, [rng.randint(100, 1024) for _ in prompts])

    @classmethod
    def code(cls, tokenizer: Tokenizer, num_prompts: int = 1) -> "Workload":
        """One request: a class in Python is to be written again under another name; 192 tokens out."""
        return cls([_asked(tokenizer, _CODE)] * num_prompts, [192] * num_prompts)

    @classmethod
    def story(cls, tokenizer: Tokenizer, num_prompts: int = 1) -> "Workload":
        """One request: a story is to be told, which seldom repeats itself; 192 tokens out."""
        return cls([_asked(tokenizer, _STORY)] * num_prompts, [192] * num_prompts)

    @classmethod
    def scheduling(cls, num_prompts: int = 4096, seed: int = 0) -> "Workload":
        """Prompts of 100 to 512 tokens, outputs of 64 to 256, for `bench scheduler`, which has no model."""
        rng = random.Random(seed)
        prompts = [_tokens(rng, 32_000, rng.randint(100, 512)) for _ in range(num_prompts)]
        return cls(prompts, [rng.randint(64, 256) for _ in prompts])

    def warm_up(self) -> "Workload":
        """Return a few of the requests with a few tokens each, which load the weights into memory."""
        few = max(1, len(self.prompts) // 8)
        return Workload(self.prompts[:few], [min(n, 8) for n in self.num_outputs[:few]])


def _asked(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a question, through the chat template where there is one."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return tokenizer.encode_chat([{"role": "user", "content": text}])


_CODE = '''Write this code again, with the class named Shelf:
```python
class Stock:
    """Counts of what is in store, by name."""

    def __init__(self):
        self.counts = {}

    def add(self, name, number):
        """Add a number of things."""
        if number < 0:
            raise ValueError("number must not be negative")
        self.counts[name] = self.counts.get(name, 0) + number

    def take(self, name, number):
        """Take a number of things away."""
        if number > self.counts.get(name, 0):
            raise ValueError("there are not so many")
        self.counts[name] = self.counts.get(name, 0) - number

    def total(self):
        """Return how many things there are."""
        return sum(self.counts.values())
```'''
_STORY = "Tell me a story about a baker, a lighthouse and a stolen clock."


def _tokens(rng: random.Random, vocab_size: int, length: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "mixed": Workload.mixed,
    "skewed": Workload.skewed,
    "shared-prefix": Workload.shared_prefix,
    "single": Workload.single,
    "long": Workload.long,
    "throughput": Workload.throughput,
}
TEXTS: dict[str, Callable[..., Workload]] = {"code": Workload.code, "story": Workload.story}
