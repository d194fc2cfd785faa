"""The learner's own starter files as parts of the real engine: `python -m labs demo lab-01,lab-03`.

Where two labs provide the same part, the later lab's is used. An error inside a part ends the run with one
sentence that names the lab, the step and the request.
"""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from types import ModuleType
from typing import Any, cast

from labs.kit.judge.guard import TimeUp, deadline, kept_alive, late, limited_prints
from labs.kit.judge.loading import Broken, namespace
from labs.kit.judge.manifest import LabError, find_lab
from labs.kit.learner.progress import Progress, all_progress
from labs.kit.toys.driver import Referee
from labs.kit.toys.words import describe, said
from mini_engine.attention import PagedBackend
from mini_engine.backends.padded import PaddedBackend
from mini_engine.engine import Engine, step
from mini_engine.outputs import Delta
from mini_engine.parts import NoWorkError, Parts
from mini_engine.request import Request
from mini_engine.show.figures import counted
from mini_engine.trace import Recorder

SECONDS_A_STEP = 30


def _fused(module: ModuleType) -> type[PaddedBackend]:
    """Return lab-04's backend. Its fused_step calls the lab's other three functions itself."""
    return type("FusedBackend", (PaddedBackend,), {"fused_step": staticmethod(module.fused_step)})


def _paged(module: ModuleType) -> Callable[..., PagedBackend]:
    """Return lab-05's backend: its functions write the pool and read it."""
    functions = {"write_kv": module.write_kv, "paged_attention": module.paged_attention}
    return lambda model, kv, next_chunk: PagedBackend(model, kv, next_chunk, **functions)


class _NoSharing:
    """The attributes that lab-05's manager lacks: it caches nothing and does not check itself."""

    enable_prefix_caching = False
    num_cached_blocks = 0

    def check(self) -> None:
        pass


def _unshared(module: ModuleType) -> Callable[..., Any]:
    manager = type("BlockManager", (module.BlockManager, _NoSharing), {"__module__": module.__name__})
    return lambda *sizes, watermark, **_: manager(*sizes, watermark=watermark)


def _grammar(module: ModuleType) -> Callable[..., Any]:
    """Return lab-09's grammars; requests with one pattern share an index."""
    index = lru_cache(64)(module.TokenIndex)
    return lambda *asked: module.RegexGrammar(index(*asked))


def _proposing(module: ModuleType) -> Callable[[list[Request]], list[list[int]]]:
    """Return lab-10's prompt lookup, for all decodes of a step; the engine verifies the drafts."""
    proposer = module.NgramProposer()
    return lambda requests: [proposer.propose(request) for request in requests]


# By lab: the parts of the engine that its tasks are, and how each is made from the lab's module.
PROVIDES: dict[str, dict[str, Callable[[ModuleType], Any]]] = {
    "lab-01": {"schedule_step": attrgetter("schedule_step")},
    "lab-02": {name: attrgetter(name) for name in ("clamp", "next_chunk")},
    "lab-03": {"Scheduler": attrgetter("Scheduler")},
    "lab-04": {"attend_backend": _fused},
    "lab-05": {"BlockManager": _unshared, "attend_backend": _paged},
    "lab-06": {"BlockManager": attrgetter("BlockManager")},
    "lab-07": {name: attrgetter(name) for name in ("step", "OutputText", "Stream")},
    "lab-08": {"Sampler": attrgetter("Sampler")},
    "lab-09": {"grammar": _grammar},
    "lab-10": {"propose": _proposing},
    "lab-11": {},  # it stands before the engine: front.py
}

# Parts that are written for one token a request and step: no drafts are proposed to them.
ONE_TOKEN = ("schedule_step", "next_chunk", "Scheduler", "attend_backend", "Sampler", "step")

# Tasks that are no part of the engine.
UNCALLED = {"lab-02": "lab-02's prefill_budget: no part of this engine calls it"}


@dataclass
class LearnerParts:
    """Parts of an engine, some of them the learner's; `names` is the lab of each of these.

    `unused` has a line for each part or lab that is not used, with the reason.
    """

    parts: Parts
    names: dict[str, str]
    unused: list[str] = field(default_factory=list)
    impl: str = "starter"
    front: ModuleType | None = None  # lab-11, which stands before the engine

    @classmethod
    def from_labs(cls, labs: str, impl: str = "starter") -> "LearnerParts":
        """Read "lab-01,lab-03", or "auto" for every lab whose tests pass.

        Raise ValueError for a lab that does not exist, and for a starter that cannot be loaded.
        """
        unused: list[str] = []
        try:
            if labs == "auto":
                labs_status = all_progress()
                chosen = [status.lab.id for status in labs_status if status.is_done]
                unused = [why_unused(status) for status in labs_status if not status.is_done]
            else:
                chosen = sorted({find_lab(lab_id).id for lab_id in labs.split(",")})
        except LabError as error:
            raise ValueError(str(error)) from None
        replaced: dict[str, Any] = {}
        names: dict[str, str] = {}
        front = None
        for lab_id in chosen:
            module = namespace(lab_id, impl)
            if isinstance(module, Broken):
                raise ValueError(str(module._problem))
            for part, build in PROVIDES[lab_id].items():
                if part in names:
                    unused.append(f"{names[part]}'s {part}: {lab_id}'s is used instead")
                replaced[part], names[part] = build(module), lab_id
            front = module if lab_id == "lab-11" else front
            if lab_id in UNCALLED:
                unused.append(UNCALLED[lab_id])
        if names.get("attend_backend") == "lab-04" and "next_chunk" in names:
            replaced.pop("next_chunk"), names.pop("next_chunk")
            unused.append("lab-02's next_chunk: lab-04's fused_step calls the engine's")
        one_token = [names[part] for part in ONE_TOKEN if part in names]
        if one_token and "propose" in names:
            why = f"{one_token[0]}'s part gives a request one token a step"
            unused.append(f"{names['propose']}'s propose: {why}")
            replaced.pop("propose"), names.pop("propose")
        if "Scheduler" in replaced or "schedule_step" in replaced:
            scheduler = replaced.get("Scheduler", Parts().Scheduler)
            replaced["Scheduler"] = lambda kv, **settings: Referee(scheduler(kv, **settings))
        replaced["step"] = _timed(replaced.get("step", step))
        return cls(Parts(**replaced), names, sorted(unused), impl, front)

    def only(self, lab_id: str) -> "LearnerParts":
        """Return the parts of one of its labs, with the engine's own for the rest."""
        return LearnerParts.from_labs(lab_id, self.impl)

    @property
    def engine_args(self) -> dict[str, Any]:
        """The Engine's arguments; lab-04's dense caches cannot share a prefix. It records, for `check`."""
        args: dict[str, Any] = {"parts": self.parts, "part_names": self.names, "record": True}
        if self.names.get("attend_backend") == "lab-04":
            args["enable_prefix_caching"] = False
        return args

    def table(self) -> list[tuple[str, str]]:
        """(part, whose), for every part of the engine."""
        owners = self.names | ({"AsyncEngine": "lab-11"} if self.front else {})
        parts = [*(part.name for part in fields(Parts)), *(["AsyncEngine"] if self.front else [])]
        return [(one, f"{owners[one]}, yours" if one in owners else "the engine's own") for one in parts]

    def check(self, engine: Engine) -> None:
        """Check after a step what must hold for any parts. Raise RuntimeError with the part at fault."""
        config, record = engine.config.scheduler_args(), cast(Recorder, engine.scheduler).steps[-1]
        for value, limit, what in (
            (record.num_batched_tokens, config["max_num_batched_tokens"], "tokens scheduled"),
            (record.num_running, config["max_num_seqs"], "requests running"),
        ):
            if value > limit:
                raise self._broken("schedule_step", f"has {value} {what}, but the limit is {limit}")
        if record.blocked.reason == "none":
            waiter = record.blocked.id
            raise self._broken("schedule_step", f"left {waiter} waiting though there was room for it")
        try:
            engine.scheduler.kv.check()
        except Exception as error:
            raise self._broken("BlockManager", str(error)) from None

    def _broken(self, part: str, what: str) -> RuntimeError:
        # Two labs have the step loop: the one that provides the whole Scheduler may contain it.
        owner = self.names.get(part) or self.names.get("Scheduler") or self.names.get("BlockManager")
        return RuntimeError(f"{owner or 'the engine'}: {part} {what}")

    def explain(self, error: BaseException, step: int | None = None) -> RuntimeError:
        """Return the error as one sentence with the lab, the step, the line and the request."""
        where = "" if step is None else f" in step {step}"
        why = late(error, SECONDS_A_STEP) if isinstance(error, TimeUp) else ""
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            path = frame.f_code.co_filename
            if isinstance(error, NoWorkError) and frame.f_code.co_name == "step":
                continue  # the caller is at fault, not this part
            if os.path.basename(path) == "starter.py":
                if isinstance(error, NotImplementedError):
                    return RuntimeError(str(error))
                request = getattr(frame.f_locals.get("request"), "request_id", None)
                about = f", with request {request}" if request else ""
                lab_id = os.path.basename(os.path.dirname(path))
                return RuntimeError(
                    f"{lab_id}: {frame.f_code.co_name} stopped the run{where}{about} "
                    f"(starter.py, line {line}): {why or describe(error)}"
                )
        owners = ", ".join(sorted(set(self.names.values()))) or "no lab's parts"
        return RuntimeError(f"the run with {owners} ended{where}: {why or said(error)}")


def _timed(step: Callable[[Engine], list[Delta]]) -> Callable[[Engine], list[Delta]]:
    def timed_step(engine: Engine) -> list[Delta]:
        with deadline(SECONDS_A_STEP), limited_prints(), kept_alive():
            return step(engine)

    return timed_step


def why_unused(status: Progress) -> str:
    """Return why a lab's parts are not used: which tests do not pass."""
    lab, unwritten = status.lab, [t.name for t in status.lab.tasks if t.name in status.unwritten]
    if status.problem:
        return status.problem
    if len(unwritten) == len(lab.tasks):
        return f"{lab.id}: not written yet"
    if unwritten:
        more = f" and {len(unwritten) - 1} more of its tasks are" if len(unwritten) > 1 else " is"
        return f"{lab.id}: {unwritten[0]}{more} not written yet"
    failed = list(dict.fromkeys(result.function for result in status.results if not result.passed))
    first = status.most_informative.function if status.most_informative else failed[0]
    more = f", and {counted(len(failed) - 1, 'more test')}" if len(failed) > 1 else ""
    return f"{lab.id}: {first} fails{more}"
