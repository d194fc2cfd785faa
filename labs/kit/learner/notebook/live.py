"""A scenario under the real Scheduler and BlockManager, a step at a time."""

from typing import Any

from labs.kit.judge import compare
from labs.kit.learner.notebook.words import happenings, timeline_text
from labs.kit.toys.driver import DEFAULTS
from labs.kit.toys.requests import make_request
from mini_engine.block_manager import BlockManager
from mini_engine.config import EngineConfig
from mini_engine.scheduler import Scheduler
from mini_engine.trace import Recorder, StepTrace, Trace

Scenario = dict[str, Any]


def changed(scenario: Scenario, **config: Any) -> Scenario:
    """The same requests under other settings: changed(scenario, num_blocks=40)."""
    return {**scenario, "config": scenario["config"] | config}


def settings(scenario: Scenario) -> EngineConfig:
    """A scenario's config, with the labs' defaults. Raises ValueError for settings that cannot work."""
    config = DEFAULTS | scenario["config"]
    return EngineConfig(enable_prefix_caching=config.pop("prefix_caching"), **config)


class LiveRun:
    """A scenario's requests under its own settings, or under `config`.

    Raises ValueError, as the engine's parts do, for settings that cannot work or a request that could
    never finish.
    """

    def __init__(self, scenario: Scenario, config: EngineConfig | None = None) -> None:
        config = config or settings(scenario)
        kv = BlockManager(config.num_blocks or 0, config.block_size, **config.kv_args())
        self.recorder = Recorder(Scheduler(kv, **config.scheduler_args()))
        self._coming = sorted(scenario["requests"], key=lambda entry: entry.get("at", 0))

    @property
    def done(self) -> bool:
        return not self._coming and not self.recorder.has_work

    @property
    def trace(self) -> Trace:
        return self.recorder.snapshot()

    def step(self) -> StepTrace | None:
        """Decide and take back one step; its record, or None if all is done."""
        while self._coming and self._coming[0].get("at", 0) <= self.recorder.step:
            fields = {k: v for k, v in self._coming.pop(0).items() if k != "at"}
            self.recorder.add(make_request(fields.pop("id"), fields.pop("prompt"), **fields))
        if self.done:
            return None
        scheduled = self.recorder.schedule()
        running = self.recorder.running
        ending = [r.request_id for r in running if scheduled.get(r.request_id) == r.num_new_tokens]
        self.recorder.update(scheduled, {request_id: [0] for request_id in ending})
        return self.recorder.steps[-1]

    def finish(self, limit: int = 1000) -> Trace:
        """Step until all is done, `limit` steps at most; the trace."""
        while not self.done and len(self.recorder.steps) < limit:
            self.step()
        return self.recorder.close("drained" if self.done else "max_steps")

    def text(self) -> str:
        """The latest step as bars, its decisions, and the timeline up to it."""
        if not self.recorder.steps:
            return "Nothing has been decided yet. Press Step."
        config, record = self.recorder.header.config, self.recorder.steps[-1]
        used = config["num_blocks"] - record.num_free_blocks
        computed = ", ".join(f"{name} {n}" for name, n in record.scheduled.items()) or "no request"
        lines = [
            f"step {record.step}: {computed}",
            f"budget   {compare.bar(record.num_batched_tokens, config['max_num_batched_tokens'])}",
            f"slots    {compare.bar(record.num_running, config['max_num_seqs'])}",
            f"KV pool  {compare.bar(used, config['num_blocks'])}",
            f"waiting  {record.num_waiting}",
            *(f"  {words}" for words in happenings(record)),
            "",
            timeline_text(self.trace),
        ]
        return "\n".join([*lines, *(["", "All requests are done."] if self.done else [])])
