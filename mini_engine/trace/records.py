"""The records of a trace: what a step decided and what it gave. docs/trace.md says more of each field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from mini_engine.trace.record import Record

VERSION = 2

# -------------------------------------------------------------------------------------------- events


@dataclass(slots=True)
class EventRecord(Record):
    """Something that happened to one request; `type` is its kind in the file."""

    what: ClassVar[str] = "the event"
    tags: ClassVar[tuple[str, ...]] = ("type",)
    type: ClassVar[str]
    id: str


@dataclass(slots=True)
class Queued(EventRecord):
    """It was added."""

    type: ClassVar[str] = "QUEUED"
    t: float
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    arrival: int


@dataclass(slots=True)
class Scheduled(EventRecord):
    """It was admitted, with so much found in the prefix cache."""

    type: ClassVar[str] = "SCHEDULED"
    num_cached_tokens: int
    cached_blocks: list[int]


@dataclass(slots=True)
class Preempted(EventRecord):
    """It was thrown out: the running needed `needs` blocks, `free` were; `for_` was the first short."""

    type: ClassVar[str] = "PREEMPTED"
    for_: str
    needs: int
    free: int


@dataclass(slots=True)
class Finished(EventRecord):
    """It is done: stop, length, abort or error."""

    type: ClassVar[str] = "FINISHED"
    reason: str


Event = Queued | Scheduled | Preempted | Finished


# ------------------------------------------------------------------------------------ requests, lines


@dataclass(slots=True)
class RequestView(Record):
    """One request in one step, as folded from the records (see fold.py).

    `state` is what the step did with it: waiting, prefill, decode, preempted (in this step) or
    finished (in an earlier one). A moment or its step is None before it comes, and where the
    trace does not say.
    """

    what: ClassVar[str] = "the header's request"
    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    arrival: int
    state: str = "waiting"
    running: bool = False
    num_scheduled: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the latest admission
    num_first_cached_tokens: int = 0  # of the first
    num_resumed_cached_tokens: int = 0  # of those after a preemption, together
    blocks: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    queued_step: int | None = None
    scheduled_step: int | None = None  # of the first admission, as t_scheduled
    t_queued: float | None = None
    t_scheduled: float | None = None
    t_first_token: float | None = None
    t_last_token: float | None = None
    t_finished: float | None = None

    @property
    def num_new_tokens(self) -> int:
        """Tokens known and not computed before this step: prompt and outputs less what is cached."""
        return self.num_prompt_tokens + self.num_output_tokens - self.num_computed_tokens

    @property
    def is_decode(self) -> bool:
        known = self.num_prompt_tokens + self.num_output_tokens
        return self.num_output_tokens > 0 and known - self.num_computed_tokens == 1


@dataclass(slots=True)
class Header(Record):
    """How a run was set up. A trace that begins in the middle of one also says how things stood then:
    the requests that were there, and the blocks whose content the prefix cache could find."""

    what: ClassVar[str] = "the header"
    tags: ClassVar[tuple[str, ...]] = ("trace", "version")
    trace: ClassVar[str] = "mini-engine"
    version: ClassVar[int] = VERSION
    clock: str
    unit: str
    backend: str
    parts: dict[str, str]
    config: dict[str, Any]
    requests: list[RequestView] = field(default_factory=list)
    cached_blocks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Blocked(Record):
    """Why the front of the queue was not admitted; where memory was short, by how many blocks."""

    what: ClassVar[str] = "the step's 'blocked'"
    reason: str
    id: str | None = None
    needs: int | None = None
    free: int | None = None


@dataclass(slots=True)
class StepTrace(Record):
    """One step. Counts are those after scheduling, before the finished gave their blocks back."""

    what: ClassVar[str] = "the step"
    step: int
    t: float
    t_end: float
    scheduled: dict[str, int]  # tokens, in row order
    num_batched_tokens: int
    num_running: int
    num_waiting: int
    blocked: Blocked
    blocks: dict[str, list[int]]  # newly given
    new_tokens: dict[str, list[int]]
    num_free_blocks: int
    num_cached_blocks: int
    events: list[Event]


@dataclass(slots=True)
class End(Record):
    """How a run closed: drained, stuck, max_steps or error; and what came after its last step."""

    what: ClassVar[str] = "the end"
    end: str
    step: int
    num_free_blocks: int | None = None
    waiting: list[str] | None = None
    running: list[str] | None = None
    error: str | None = None
    events: list[Event] = field(default_factory=list)


@dataclass
class Trace:
    """A recorded run."""

    header: Header
    steps: list[StepTrace] = field(default_factory=list)
    end: End | None = None

    def lines(self) -> list[Record]:
        """The records in the order of the file."""
        return [self.header, *self.steps, *([self.end] if self.end else [])]
