"""The call at which two logs of operations part, and the words for a call and for what it gave."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from labs.kit.judge.compare import comparable
from labs.kit.judge.sentences.rules import Clauses
from labs.kit.judge.sentences.words import count, joined, pair, place, places, value
from labs.kit.toys.driver import OpLog, OpStep

RAISED = "raised"  # the key of what a call raised, in `returned`
NAMING = re.compile(r"(\w+Error) (naming|without) (\S+)")  # what lab-01's step makes of an error
STEPS = ("step", "schedule")  # calls that return the rows of a step
LONG = 40  # characters of what the reference returned, where yours raised
Found = Iterator[Clauses]


@dataclass
class Parting:
    """The call at which two logs part: both records, the state that both saw before it, and the config."""

    log: OpLog  # the reference's
    number: int
    yours: OpStep
    theirs: OpStep

    def __post_init__(self) -> None:
        self.config = self.log.header.config
        self.before = self.log.steps[self.number - 1].observed if self.number else {}

    @property
    def call(self) -> str:
        return f"In step {self.yours.step} your {call_of(self.yours)}"

    @property
    def after(self) -> str:
        return f"After step {self.yours.step}, {call_of(self.yours)},"

    def seen(self, key: str) -> tuple[Any, Any]:
        """Return what the two saw under a key after the call; None where there is none."""
        return self.yours.observed.get(key), self.theirs.observed.get(key)


def call_of(step: OpStep) -> str:
    name, *arguments = step.op
    return f"{name}({', '.join(map(value, arguments))})"


def gives(step: OpStep) -> str:
    """Return what a call returned or raised, in words."""
    if isinstance(step.returned, dict) and list(step.returned) == [RAISED]:
        return f"raises {step.returned[RAISED]}"
    if isinstance(step.returned, str) and (found := NAMING.fullmatch(step.returned)):
        return f"raises a {found[1]} that {'names' if found[2] == 'naming' else 'does not name'} {found[3]}"
    if step.op[0] in STEPS and is_schedule(step.returned):
        return schedules(dict(step.returned))
    return "returns" if step.returned is None else f"returns {value(step.returned)}"


def has_raised(step: OpStep) -> bool:
    return gives(step).startswith("raises ")


def is_schedule(returned: Any) -> bool:
    """Whether these are the rows [id, tokens] of labs 01 and 03."""
    rows = returned if isinstance(returned, list) else [None]
    return all(isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) for row in rows)


def schedules(scheduled: dict[str, Any]) -> str:
    """Return "gives a 1 token and b 3 tokens"."""
    rows = [f"{value(name)} {count(tokens, 'token')}" for name, tokens in scheduled.items()]
    return f"gives {joined(rows)}" if rows else "schedules nothing"


def plainest(at: Any) -> Found:
    """Report which field differs, where no other rule of logs or of traces has a word for it."""
    for path, *both in places(comparable(at.yours), comparable(at.theirs)):
        mine, other = pair(*both)
        yield "field", f"In step {at.number} {place(path)} is {mine}", f"in the reference it is {other}"
    yield "field", f"In step {at.number} your run differs", "see the reference's beside it"
