"""The cases of docs/real-bugs.md, played on the course's own code with the bug put in.

python docs/images/real_bugs.py     draws docs/images/bugs/*.png, and prints where each run departs
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


@dataclass(frozen=True)
class Case:
    name: str  # of its picture, and of its place in the page
    lab: str
    bug: str  # of the lab's known mistakes, or of VARIANTS below
    scenario: dict[str, Any]
    picture: bool = True

    @property
    def caught_by(self) -> str:
        """The test of the lab that fails with this bug."""
        return next((bug.caught_by for bug in find_lab(self.lab).mistakes if bug.id == self.bug), "")

    def runs(self, raise_errors: bool = True) -> tuple[Any, Any]:
        """With the bug, and without; if asked, only as far as a watch that notices something lets it go."""
        lab = find_lab(self.lab)
        scenarios = loading.load(self.lab, "scenarios")
        if self.bug in VARIANTS:
            wrong = VARIANTS[self.bug]
        else:
            wrong = loading.mistaken(lab, next(bug for bug in lab.mistakes if bug.id == self.bug))
        right = _run(scenarios, loading.namespace(self.lab, "solution"), self.scenario)
        try:
            return _run(scenarios, wrong, self.scenario), right
        except AssertionError:
            if raise_errors:
                raise
            return RUNS[-1][1], right

    def text(self) -> str:
        """The first step that departs, side by side, as a failing test shows it; or what a watch noticed."""
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
        figures.save(axes, FOLDER / f"{self.name}.png", dpi=130)


def _run(scenarios: Any, which: Any, scenario: dict[str, Any]) -> Any:
    if "block_size" in scenario["config"] and hasattr(
        which, "schedule_step"
    ):  # lab-01's, on the engine's memory
        config = scenario["config"]
        kv = BlockManager(config["num_blocks"], config["block_size"], watermark=0)
        limits = {name: config[name] for name in ("max_num_batched_tokens", "max_num_seqs")}
        made = engine.Scheduler(kv, schedule_step=which.schedule_step, **limits)
        return drive(made, scenario, raise_errors=False)
    if isinstance(which, type):  # a scheduler of our own
        settings = ("policy", "max_num_batched_tokens", "max_num_seqs")
        config = scenario["config"]
        made = which(FakeKV(config["num_blocks"]), **{k: config[k] for k in settings if k in config})
        return drive(made, scenario, raise_errors=False)
    return scenarios.run(which, scenario, raise_errors=False)


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


def _requests(*entries: tuple[Any, ...]) -> list[dict[str, Any]]:
    keys = ("id", "prompt", "max_tokens", "at", "priority")
    return [dict(zip(keys, entry, strict=False)) for entry in entries]


def _config(budget: int, slots: int, blocks: int, **more: Any) -> dict[str, Any]:
    return {
        "max_num_batched_tokens": budget, "max_num_seqs": slots, "long_prefill_token_threshold": 0,
        "num_blocks": blocks, "watermark": 0, **more,
    }  # fmt: skip


def _scheduling(name: str, *requests: tuple[Any, ...], **config: Any) -> dict[str, Any]:
    limits = [config.pop(key) for key in ("budget", "slots", "blocks")]
    return {
        "name": name,
        "config": _config(*limits, **config),
        "requests": _requests(*requests),
        "max_steps": 60,
    }


TEXT = list(range(100, 108))  # eight tokens: two full blocks of four
POOL = {"num_blocks": 8, "block_size": 4}

CASES = [
    Case("whole-prompt-cached", "lab-06", "full-hit", {
        "name": "the same prompt twice, and it fills its blocks",
        "config": POOL,
        "ops": [["admit", "a", TEXT], ["compute", "a", 8], ["admit", "b", TEXT]],
    }, picture=False),
    Case("counted-too-early", "lab-01", "counted-before-admit", {
        "name": "the second finds the first",
        "config": _config(16, 4, 8, block_size=4, prefix_caching=True),
        "requests": [
            {"id": "a", "prompt": [*TEXT, 1], "max_tokens": 4, "at": 0},
            {"id": "b", "prompt": [*TEXT, 2], "max_tokens": 4, "at": 1},
        ],
    }, picture=False),
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
        budget=16, slots=2, blocks=64,
    )),
    Case("never-fits", "lab-03", "never-fits-but-queued", _scheduling(
        "a request that is larger than the pool", ("huge", 12, 12, 0), ("small", 2, 3, 0),
        budget=16, slots=4, blocks=16, policy="fcfs",
    ) | {"max_steps": 24}),
    Case("prefill-first", "lab-03", "prefill-first", _scheduling(
        "prompts keep coming", ("chat", 3, 8, 0), *((f"doc{i}", 12, 2, i) for i in range(1, 5)),
        budget=16, slots=8, blocks=128, policy="fcfs",
    )),
    Case("outputs-dropped", "lab-03", "outputs-dropped", _scheduling(
        "two in a tight pool", ("r0", 5, 6, 0), ("r1", 5, 4, 0), budget=16, slots=4, blocks=12, policy="fcfs",
    )),
    Case("checked-not-claimed", "lab-01", "room-checked-not-claimed", _scheduling(
        "two long prompts in a pool for one", ("a", 15, 3, 0), ("b", 15, 3, 0), budget=8, slots=4, blocks=20,
        long_prefill_token_threshold=4,
    )),
    Case("never-a-chunk", "lab-02", "all-or-nothing", _scheduling(
        "a prompt that is longer than the budget", ("a", 9, 3, 0), budget=6, slots=4, blocks=64,
    ), picture=False),
    Case("freed-twice", "lab-05", "double-free", {
        "name": "a request that leaves twice",
        "config": {"num_blocks": 6, "block_size": 4},
        "ops": [["admit", "a", 8], ["free", "a"], ["free", "a"]],
    }, picture=False),
    Case("victim-stays-scheduled", "lab-03", "victim-stays-scheduled", _scheduling(
        "the important one is short", ("low", 6, 6, 0, 2), ("high", 6, 6, 1, 0),
        budget=16, slots=4, blocks=16, policy="priority",
    )),
]  # fmt: skip


def main() -> None:
    for case in CASES:
        print(f"{case.name} ({case.lab}, {case.caught_by})\n{case.text()}\n")
        if case.picture:
            case.draw()


if __name__ == "__main__":
    main()
