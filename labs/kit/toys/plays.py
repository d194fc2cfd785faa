"""The shared part of the plays of random scripts: requests by name, and a watch over what may only be read.

No module here imports torch: the pages in a browser load them.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dis import get_instructions
from types import CodeType, FunctionType, ModuleType
from typing import Any

from labs.kit.toys.driver import OpLog, Scenario, log_ops
from labs.kit.toys.scripts import Skip
from mini_engine.request import Request, RequestStatus, SamplingParams

# Of a Request, the engine's business: the answers to one prompt, sampled drafts, a grammar.
NOT_SHOWN = {"siblings", "num_forked_tokens", "num_external_computed_tokens", "spec_probs", "grammar"}
SCALARS = {int, str, bool, float, type(None), bytes, RequestStatus, SamplingParams}  # nothing in them changes


class Play:
    """The state of a script that is being played on `part`; a lab's Play adds the calls of its scripts."""

    is_oracle = False  # set by the judge where `part` is the oracle, which may take its time

    def __init__(self, part: Any):
        self.part = part
        self.requests: dict[str, Request] = {}  # the latest of each name
        self.changed: list[str] = []  # what a call has changed, though it may only read it
        self.lent: dict[str, tuple[Any, Any]] = {}  # what earlier calls returned, and a copy of it

    def known(self, name: str) -> Request:
        """Return the request of that name; a call that names another has no place in the script."""
        if name not in self.requests:
            raise Skip
        return self.requests[name]

    def seen(self) -> dict[str, Any]:
        """Return what can be seen after a call, as JSON; a lab's Play says what that is."""
        raise NotImplementedError

    def observe(self) -> dict[str, Any]:
        """Return what a log of operations shows after each."""
        return self.seen()

    def log(self, scenario: Scenario, raise_errors: bool = True) -> OpLog:
        """Carry out a scenario's operations; one that has no place there returns None."""

        def perform(name: str, arguments: list[Any]) -> Any:
            with suppress(Skip):
                return getattr(self, name)(*arguments)

        return log_ops(scenario, perform, self.observe, raise_errors=raise_errors)

    def names_that_need_torch(self) -> list[str]:
        """Return the names that the part's functions take from the top of the file, and the file from torch.

        A module that imports torch counts as torch. One task among another file's names uses none of them.
        """

        def home(value: Any) -> str:
            module = isinstance(value, ModuleType)
            return (value.__name__ if module else getattr(value, "__module__", None)) or ""

        own = vars(self.part)
        if "__source__" not in own:
            return []
        read = (one for code in codes_of(own.values(), own) for one in get_instructions(code))
        used = {one.argval for one in read if one.opname == "LOAD_GLOBAL"}  # what a code imports is its own
        homes = {name: home(value) for name, value in own.items() if name in used}
        need_torch = {
            one: one.partition(".")[0] == "torch" or "torch" in vars(sys.modules.get(one, object))
            for one in {*homes.values()} - {own["__name__"]}  # not the file itself
        }
        return sorted(name for name, one in homes.items() if need_torch.get(one))

    @contextmanager
    def only_reading(self, **given: Any) -> Iterator[None]:
        """Note all that changes inside: each entry of a dict, each field of a request."""
        before = {name: plain(value) for name, value in given.items()}
        try:
            yield
        finally:
            for name, value in given.items():
                self.changed += differences(name, before[name], plain(value))

    def lend(self, name: str, value: Any) -> None:
        """Note a value that the caller goes on reading: no later call may change it."""
        self.lent[name] = value, plain(value)

    def all_changed(self) -> list[str]:
        """Return what was changed since this was last asked for."""
        changed, self.changed = self.changed, []
        return changed + [name for name, (value, copy) in self.lent.items() if plain(value) != copy]


def codes_of(values: Iterable[Any], home: dict[str, Any]) -> Iterator[CodeType]:
    """Yield the code of the functions that were defined in a module, `home`, and of what they contain."""
    for value in values:
        if isinstance(value, CodeType):
            yield value
            yield from codes_of(value.co_consts, home)
        elif isinstance(value, FunctionType) and value.__globals__ is home:
            yield from codes_of([value.__code__], home)
        elif isinstance(value, type) and value.__module__ == home["__name__"]:
            yield from codes_of(vars(value).values(), home)


def plain(value: Any) -> Any:
    """Return a copy that can be compared: of tensors the numbers, of requests the fields."""
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind in (list, tuple) and SCALARS.issuperset(map(type, value)):  # token ids, mostly: often and long
        return list(value)
    if kind is Request or isinstance(value, Request):
        # Its lists are of token ids, often thousands: they are copied unread.
        return {
            name: one if type(one) in SCALARS else one[:] if type(one) is list else plain(one)
            for name, one in vars(value).items()
            if name not in NOT_SHOWN
        }
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [one.request_id if isinstance(one, Request) else plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def fields_changed(before: dict[Request, dict[str, Any]], look: Callable[[Request], Any]) -> list[str]:
    """Return the fields that `look` sees otherwise than before: ["r0.arrival"]."""
    both = ((request.request_id, fields, look(request)) for request, fields in before.items())
    return [f"{name}.{key}" for name, was, now in both for key in now if now[key] != was.get(key, ...)]


def differences(name: str, before: Any, after: Any) -> Iterator[str]:
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for key in before:
            yield from differences(f"{name}.{key}", before[key], after[key])
    else:
        yield name


class Unnamed(ValueError):
    """An error that does not say which request it is about."""


@contextmanager
def naming(request_id: str) -> Iterator[None]:
    """A ValueError that comes out must have the request's id in its text."""
    try:
        yield
    except ValueError as error:
        if type(error) is ValueError and request_id not in str(error):
            raise Unnamed(f"the message does not name {request_id}: {error}") from error
        raise


def in_runs(numbers: Iterable[int]) -> str:
    """Return numbers as "0..3, 8, 4..6"; shorter to read, and to compare."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}..{last}" for first, last in runs)


class Counted(int):
    """A number whose comparisons are counted; each is a call of a Python function."""

    comparisons = 0

    @staticmethod
    def _counted(compare: Callable[[int, Any], bool]) -> Any:
        def look(self: int, other: Any) -> bool:
            Counted.comparisons += 1
            return compare(self, other)

        return look

    __lt__, __le__, __gt__, __ge__ = map(_counted, (int.__lt__, int.__le__, int.__gt__, int.__ge__))
    __eq__, __ne__, __hash__ = _counted(int.__eq__), _counted(int.__ne__), int.__hash__


def steps_of(call: Callable[[], object]) -> int:
    """Return how many lines and calls of Python a call takes: work, measured without a clock."""
    count, others = 0, sys.gettrace()

    def look(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return look

    sys.settrace(look)
    try:
        call()
    finally:
        sys.settrace(others)
    return count
