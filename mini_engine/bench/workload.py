"""The workload that static batching is bad at: prompts and outputs of mixed length."""

import random
from dataclasses import dataclass


@dataclass
class Workload:
    """Prompts as token ids, and for each how many tokens to put out."""

    prompts: list[list[int]]
    num_outputs: list[int]

    @classmethod
    def mixed(cls, vocab_size: int, num_prompts: int = 32, seed: int = 0) -> "Workload":
        """Prompts of 16 to 256 random tokens, outputs of 16, 32, 64 or 128."""
        rng = random.Random(seed)
        prompts = [
            [rng.randrange(vocab_size) for _ in range(rng.randint(16, 256))] for _ in range(num_prompts)
        ]
        return cls(prompts, [rng.choice((16, 32, 64, 128)) for _ in prompts])
