"""The cases of docs/real-bugs.md, played on the course's own code with the bug put in.

python docs/images/real_bugs.py     draws docs/images/bugs/*.svg, and prints where each run departs
"""

from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from labs.kit import FakeKV, drive
from labs.kit.judge import compare, loading
from labs.kit.judge.manifest import find_lab
from labs.kit.toys.driver import RUNS
from mini_engine import scheduler as engine
from mini_engine.block_manager import BlockManager
from mini_engine.request_queue import pick_victim
from mini_engine.show import figures
from mini_engine.sim.baselines import BASELINES

FOLDER = Path(__file__).with_name("bugs")
LIMITS = ("max_num_batched_tokens", "max_num_seqs", "policy")


@dataclass(frozen=True)
class Case:
    name: str  # of its picture, and of its place in the page
    lab: str
    bug: str  # of the lab's known mistakes, or of VARIANTS below
    scenario: dict[str, Any]
    picture: bool = True

    @property
    def mistake(self) -> Any:
        return next((mistake for mistake in find_lab(self.lab).mistakes if mistake.id == self.bug), None)

    @property
    def caught_by(self) -> str:
        """The test of the lab that fails with this bug."""
        return self.mistake.caught_by if self.mistake else ""

    def runs(self, raise_errors: bool = True) -> tuple[Any, Any]:
        """With the bug, and without; without `raise_errors`, up to the step that a check has stopped."""
        wrong = VARIANTS.get(self.bug) or loading.mistaken(find_lab(self.lab), self.mistake)
        right = self._run(loading.namespace(self.lab, "solution"))
        try:
            return self._run(wrong), right
        except AssertionError:
            if raise_errors:
                raise
            return RUNS[-1][1], right

    def text(self) -> str:
        """The first step that departs, side by side, as a failing test shows it; or what a check noticed."""
        try:
            yours, reference = self.runs()
        except AssertionError as noticed:  # lab-06's ledger reads what each request would read
            return "\n".join(wrap(str(noticed), 78))
        return compare.show(self.scenario, yours, reference, compare.departure(yours, reference), 78)

    def draw(self) -> None:
        yours, reference = self.runs()
        if reference.steps:
            axes = figures.compare(yours, reference, labels=("with the bug", "without"))
        else:  # the request is refused, and nothing runs
            axes = figures.timeline(yours)
        FOLDER.mkdir(exist_ok=True)
        figures.save(axes, FOLDER / f"{self.name}.svg", dpi=130)

    def _run(self, which: Any) -> Any:
        config = self.scenario["config"]
        limits = {name: value for name, value in config.items() if name in LIMITS}
        if isinstance(which, type):  # a scheduler of our own
            made = which(FakeKV(config["num_blocks"]), **limits)
        elif "block_size" in config and hasattr(which, "schedule_step"):  # lab-01's, on the engine's memory
            kv = BlockManager(config["num_blocks"], config["block_size"], watermark=0)
            made = engine.Scheduler(kv, schedule_step=which.schedule_step, **limits)
        else:
            return loading.load(self.lab, "scenarios").run(which, self.scenario, raise_errors=False)
        return drive(made, self.scenario, raise_errors=False)


class VictimStaysScheduled(engine.Scheduler):
    """Preempts while it walks over the running requests, as vLLM does, and forgets that the victim may have
    been given tokens in this very step."""

    def schedule(self) -> dict[str, int]:
        scheduled, preempted = {}, False
        for request in list(self.running):
            while request in self.running and not self.kv.allocate(request, request.num_new_tokens):
                self.preempt(pick_victim(self.running, self.policy))
                preempted = True
            if request in self.running:
                scheduled[request.request_id] = request.num_new_tokens
        return scheduled if preempted else super().schedule()


VARIANTS: dict[str, Any] = {
    "victim-stays-scheduled": VictimStaysScheduled,
    "prefill-first": BASELINES["prefill-first"].scheduler,
}


def _scheduling(name: str, *requests: Any, limits: tuple[int, int, int], **config: Any) -> dict[str, Any]:
    """A scenario; `limits` are the tokens of a step, the requests that run, and the blocks of the pool."""
    keys = ("id", "prompt", "max_tokens", "at", "priority")
    config |= dict(zip((*LIMITS[:2], "num_blocks"), limits, strict=True))
    config |= {"long_prefill_token_threshold": config.get("long_prefill_token_threshold", 0), "watermark": 0}
    entries = [dict(zip(keys, entry, strict=False)) for entry in requests]
    return {"name": name, "config": config, "requests": entries, "max_steps": 60}


TEXT = list(range(100, 108))  # eight tokens: two full blocks of four
POOL = {"num_blocks": 8, "block_size": 4}

CASES = [
    Case("whole-prompt-cached", "lab-06", "full-hit", {
        "name": "the same prompt twice, and it fills its blocks",
        "config": POOL,
        "ops": [["admit", "a", TEXT], ["compute", "a", 8], ["admit", "b", TEXT]],
    }, picture=False),
    Case("counted-too-early", "lab-01", "counted-before-admit", _scheduling(
        "the second finds the first", ("a", [*TEXT, 1], 4, 0), ("b", [*TEXT, 2], 4, 1),
        limits=(16, 4, 8), block_size=4, prefix_caching=True,
    ), picture=False),
    Case("found-too-early", "lab-06", "published-too-early", {
        "name": "the same beginning in one step",
        "config": POOL,
        "ops": [["admit", "a", [*TEXT, 1]], ["compute", "a", 4], ["admit", "b", [*TEXT, 2]]],
    }, picture=False),
    Case("old-name", "lab-06", "stale-hash", {
        "name": "a block that has another owner now",
        "config": {"num_blocks": 3, "block_size": 4},
        "ops": [
            ["admit", "a", [*TEXT, 1]], ["compute", "a", 9], ["free", "a"],
            ["admit", "b", list(range(9))], ["compute", "b", 9], ["free", "b"], ["admit", "c", [*TEXT, 2]],
        ],
    }, picture=False),
    Case("one-slot-too-many", "lab-01", "slots-of-this-step-only", _scheduling(
        "two slots, three requests", ("a", 4, 6, 0), ("b", 4, 6, 0), ("c", 4, 4, 1),
        limits=(16, 2, 64),
    )),
    Case("never-fits", "lab-03", "never-fits-but-queued", _scheduling(
        "a request that is larger than the pool", ("huge", 12, 12, 0), ("small", 2, 3, 0),
        limits=(16, 4, 16), policy="fcfs",
    ) | {"max_steps": 24}),
    Case("prefill-first", "lab-03", "prefill-first", _scheduling(
        "prompts keep coming", ("chat", 3, 8, 0), *((f"doc{i}", 12, 2, i) for i in range(1, 5)),
        limits=(16, 8, 128), policy="fcfs",
    )),
    Case("outputs-dropped", "lab-03", "outputs-dropped", _scheduling(
        "two in a tight pool", ("r0", 5, 6, 0), ("r1", 5, 4, 0), limits=(16, 4, 12), policy="fcfs",
    )),
    Case("checked-not-claimed", "lab-01", "room-checked-not-claimed", _scheduling(
        "two long prompts in a pool for one", ("a", 15, 3, 0), ("b", 15, 3, 0), limits=(8, 4, 20),
        long_prefill_token_threshold=4,
    )),
    Case("never-a-chunk", "lab-02", "all-or-nothing", _scheduling(
        "a prompt that is longer than the budget", ("a", 9, 3, 0), limits=(6, 4, 64),
    ), picture=False),
    Case("freed-twice", "lab-05", "double-free", {
        "name": "a request that leaves twice",
        "config": {"num_blocks": 6, "block_size": 4},
        "ops": [["admit", "a", 8], ["free", "a"], ["free", "a"]],
    }, picture=False),
    Case("victim-stays-scheduled", "lab-03", "victim-stays-scheduled", _scheduling(
        "the important one is short", ("low", 6, 6, 0, 2), ("high", 6, 6, 1, 0),
        limits=(16, 4, 16), policy="priority",
    )),
]  # fmt: skip


def main() -> None:
    for case in CASES:
        print(f"{case.name} ({case.lab}, {case.caught_by})\n{case.text()}\n")
        if case.picture:
            case.draw()


if __name__ == "__main__":
    main()
