"""Runs a scenario on the engine's Scheduler and BlockManager, or with a lab's part instead."""

from typing import Any

from labs.kit.judge import loading
from labs.kit.judge.compare import Run
from labs.kit.toys.driver import DEFAULTS, drive
from mini_engine.block_manager import BlockManager
from mini_engine.config import EngineConfig
from mini_engine.scheduler import Scheduler

Scenario = dict[str, Any]
PARTS = {  # the engine's parts that a lab provides
    "lab-01": ("schedule_step",),
    "lab-02": ("clamp", "next_chunk"),
    "lab-03": ("Scheduler",),
    "lab-05": ("BlockManager",),
    "lab-06": ("BlockManager",),
}


def changed(scenario: Scenario, **config: Any) -> Scenario:
    """Return the scenario with other settings: changed(scenario, num_blocks=40)."""
    return {**scenario, "config": scenario["config"] | config}


def run_scenario(scenario: Scenario, lab_id: str = "", module: Any = None) -> Run:
    """Return the whole run of a scenario; a toy replaces the model.

    With `lab_id`, this lab's part comes from `module`: its starter, its solution, or the engine's own. A
    scenario of operations, and one of a lab of tensors, runs as that lab runs it. Raise ValueError for
    settings that cannot work or a request that could never finish, and any error of the module.
    """
    if "ops" in scenario or lab_id not in ("", *PARTS):
        log: Run = loading.load(lab_id, "scenarios").run(module, scenario)
        return log
    given = DEFAULTS | scenario["config"]
    config = EngineConfig(enable_prefix_caching=given.pop("prefix_caching"), **given)
    own = {name: getattr(module, name) for name in PARTS.get(lab_id, ())}
    if lab_id == "lab-05":  # its manager needs lab-05's own driver
        pool = loading.load(lab_id, "scenarios").Pool
        kv = pool(module, config.num_blocks, config.block_size, config.watermark)
    else:
        manager = own.get("BlockManager", BlockManager)
        kv = manager(config.num_blocks or 0, config.block_size, **config.kv_args())
    parts = {name: own[name] for name in ("schedule_step", "clamp") if name in own}
    scheduler = own.get("Scheduler", Scheduler)(kv, **config.scheduler_args(), **parts)
    cuts = {"next_chunk": own["next_chunk"]} if "next_chunk" in own else {}
    return drive(scheduler, scenario, **cuts, parts=dict.fromkeys(own, lab_id))
