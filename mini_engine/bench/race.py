"""The race: contestants take turns, so that a noisy machine is noisy to all; medians are compared.

They serve the workload that static batching is bad at: prompts and outputs of mixed length.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table

from mini_engine.show.figures import counted


@dataclass
class Workload:
    """Prompts as token ids, and for each how many tokens to put out."""

    prompts: list[list[int]]
    num_outputs: list[int]

    @classmethod
    def mixed(cls, vocab_size: int, num_prompts: int = 32, seed: int = 0) -> "Workload":
        """Prompts of 16 to 256 random tokens, outputs of 16, 32, 64 or 128."""
        rng = random.Random(seed)
        lengths = (rng.randint(16, 256) for _ in range(num_prompts))  # drawn in turn with the tokens
        prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
        return cls(prompts, [rng.choice((16, 32, 64, 128)) for _ in prompts])


Contestant = Callable[[Workload], list[list[int]]]


@dataclass
class Result:
    """Wall seconds of every round, and the tokens that each contestant gave."""

    seconds: dict[str, list[float]]
    tokens: dict[str, list[list[int]]]
    num_output_tokens: int

    def rate(self, name: str) -> float:
        """Output tokens a second, by the median round."""
        return self.num_output_tokens / statistics.median(self.seconds[name])

    def ratios(self, name: str, baseline: str) -> list[float]:
        """How many times faster `name` was, round by round."""
        pairs = zip(self.seconds[name], self.seconds[baseline], strict=True)
        return [theirs / ours for ours, theirs in pairs]

    def num_equal(self, name: str, baseline: str) -> int:
        pairs = zip(self.tokens[name], self.tokens[baseline], strict=True)
        return sum(ours == theirs for ours, theirs in pairs)


def run(
    contestants: dict[str, Contestant], load: Workload, rounds: int, report: Callable[[str], None]
) -> Result:
    """Let each contestant serve the workload once to warm up, then in turns; `report` gets a line a turn."""
    tokens: dict[str, list[list[int]]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, serve in contestants.items():
            start = time.perf_counter()
            tokens[name] = serve(load)
            seconds[name].append(time.perf_counter() - start)
            turn = f"round {number} of {rounds}" if number else "warm-up"
            report(f"{turn}: {name} {seconds[name][-1]:.2f} s")
    timed = {name: all_seconds[1:] for name, all_seconds in seconds.items()}
    return Result(timed, tokens, sum(load.num_outputs))


def table(result: Result, name: str = "mini-engine", baseline: str = "transformers") -> Table:
    """The comparison as a rich table, and the ratio with its spread as its caption."""
    shown = Table("", "median s", "min s", "max s", "output tokens/s", header_style="bold")
    for contestant, seconds in result.seconds.items():
        numbers = (statistics.median(seconds), min(seconds), max(seconds))
        shown.add_row(contestant, *(f"{n:.2f}" for n in numbers), f"{result.rate(contestant):.1f}")
    ratios = result.ratios(name, baseline)
    shown.caption = (
        f"{name} is {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f} "
        f"over {counted(len(ratios), 'round')}); tokens equal in {result.num_equal(name, baseline)} of "
        f"{len(result.tokens[name])} requests"
    )
    shown.caption_justify = "left"
    return shown
