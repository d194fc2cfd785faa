"""The learner's own starter files as parts of the real engine: `mini-engine demo --labs lab-01,lab-03`.

Where two labs provide the same part, the later lab wins. Whatever goes wrong inside a part ends the
run in one sentence that names the lab, the step and the request.
"""

import inspect
import os
import traceback
from dataclasses import dataclass, fields

from labs.kit.judge.guard import TimeUp, deadline, describe, kept_alive, limited_prints, said
from labs.kit.judge.loading import Broken, namespace
from labs.kit.judge.manifest import LabError, find_lab, lab_ids
from labs.kit.learner.progress import progress
from labs.kit.toys.driver import Referee
from mini_engine.engine import Engine, Parts

SECONDS_A_STEP = 30

# lab: the parts of the engine that its tasks make.
PROVIDES = {
    "lab-01": ("schedule_step",),
    "lab-02": ("clamp", "next_chunk"),
    "lab-03": ("Scheduler",),
    "lab-04": ("attend_backend",),
    "lab-05": ("BlockManager", "attend_backend"),
    "lab-06": ("BlockManager",),
    "lab-07": ("step",),
}


@dataclass
class LearnerParts:
    """Parts of an engine, some of them the learner's; `names` says of each which lab it is from."""

    parts: Parts
    names: dict[str, str]

    @classmethod
    def from_labs(cls, labs: str, impl: str = "starter") -> "LearnerParts":
        """Read "lab-01,lab-03", or "auto" for every lab whose tests pass.

        Raises ValueError for a lab that does not exist, and for a starter that cannot be loaded.
        """
        try:
            chosen = passing_labs() if labs == "auto" else sorted({find_lab(i).id for i in labs.split(",")})
        except LabError as error:
            raise ValueError(str(error)) from None
        replaced, names = {}, {}
        for lab_id in chosen:
            module = namespace(lab_id, impl)
            if isinstance(module, Broken):
                raise ValueError(str(module._problem))
            for part in PROVIDES[lab_id]:
                replaced[part], names[part] = _build(lab_id, part, module), lab_id
        if names.get("attend_backend") == "lab-04":  # its fused_step calls the engine's
            replaced.pop("next_chunk", None), names.pop("next_chunk", None)
        if "Scheduler" in replaced or "schedule_step" in replaced:
            scheduler = replaced.get("Scheduler", Parts().Scheduler)
            replaced["Scheduler"] = lambda kv, **settings: Referee(scheduler(kv, **settings))
        replaced["step"] = _timed(replaced.get("step", Parts().step))
        return cls(Parts(**replaced), names)

    @property
    def engine_args(self) -> dict:
        """What the Engine has to be told; lab-04's dense caches cannot share a prefix."""
        args = {"parts": self.parts, "part_names": self.names}
        if self.names.get("attend_backend") == "lab-04":
            args["enable_prefix_caching"] = False
        return args

    def table(self) -> list[tuple[str, str]]:
        """(part, whose), for every part of the engine."""
        return [
            (part.name, f"{self.names[part.name]}, yours" if part.name in self.names else "the engine's own")
            for part in fields(Parts)
        ]

    def check(self, engine: Engine) -> None:
        """After a step: what must hold whoever wrote the parts. Raises RuntimeError in words."""
        config, record = engine.scheduler.trace.header["config"], engine.scheduler.trace.steps[-1]
        for told, limit, what in (
            (record["num_batched_tokens"], config["max_num_batched_tokens"], "tokens scheduled"),
            (record["num_running"], config["max_num_seqs"], "requests running"),
        ):
            if told > limit:
                raise self._broken("schedule_step", f"has {told} {what}, but the limit is {limit}")
        if record["blocked"]["reason"] == "none":
            waiter = record["blocked"]["id"]
            raise self._broken("schedule_step", f"left {waiter} waiting though there was room for it")
        try:
            getattr(engine.scheduler.kv, "check", lambda: None)()
        except Exception as error:
            raise self._broken("BlockManager", str(error)) from None

    def _broken(self, part: str, what: str) -> RuntimeError:
        # The step loop lives in two labs: the one that provides the whole Scheduler may do it itself.
        owner = self.names.get(part) or self.names.get("Scheduler") or self.names.get("BlockManager")
        return RuntimeError(f"{owner or 'the engine'}: {part} {what}")

    def explain(self, error: BaseException, step: int | None = None) -> RuntimeError:
        """The error in one sentence: whose part, in which step, at which line, with which request."""
        where = "" if step is None else f" in step {step}"
        late = isinstance(error, TimeUp) and f"no answer within {SECONDS_A_STEP:g} s: a loop that never ends?"
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            path = frame.f_code.co_filename
            if os.path.basename(path) == "starter.py":
                if isinstance(error, NotImplementedError):
                    return RuntimeError(str(error))
                request = getattr(frame.f_locals.get("request"), "request_id", None)
                about = f", with request {request}" if request else ""
                lab_id = os.path.basename(os.path.dirname(path))
                return RuntimeError(
                    f"{lab_id}: {frame.f_code.co_name} stopped the run{where}{about} "
                    f"(starter.py, line {line}): {late or describe(error)}"
                )
        owners = ", ".join(sorted(set(self.names.values()))) or "no lab's parts"
        return RuntimeError(f"the run with {owners} ended{where}: {late or said(error)}")


def _build(lab_id: str, part: str, module):
    """The part that a lab's module makes; some are put together from several functions."""
    if part == "attend_backend" and lab_id == "lab-04":
        from mini_engine.backends.padded import PaddedBackend

        return _with(PaddedBackend, module)
    if part == "attend_backend":
        from mini_engine.attention import PagedBackend

        return _with(PagedBackend, module)
    made = getattr(module, part)
    if part == "BlockManager":
        accepted = inspect.signature(made).parameters
        # lab-05's manager knows nothing of prefix caching yet, and need not.
        return lambda num_blocks, block_size, **settings: made(
            num_blocks, block_size, **{k: v for k, v in settings.items() if k in accepted}
        )
    return made


def _with(backend, module):
    """A backend whose functions are the lab's, where the lab has them."""
    accepted = inspect.signature(backend).parameters
    functions = {name: getattr(module, name) for name in accepted if hasattr(module, name)}
    return lambda model, kv, **settings: backend(model, kv, **{**settings, **functions})


def _timed(step):
    def timed_step(engine):
        with deadline(SECONDS_A_STEP), limited_prints(), kept_alive():
            return step(engine)

    return timed_step


def passing_labs() -> list[str]:
    """The labs whose tests pass on the learner's starter."""
    return [lab_id for lab_id in lab_ids() if progress(find_lab(lab_id)).is_done]
