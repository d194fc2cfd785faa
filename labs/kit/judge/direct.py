"""The sentence on a test that records no run: the first call of the lab's code that gives something else.

Such a test calls functions and methods directly. It runs again on the learner's file and on the reference;
each call is noted, what it returned or raised, and how it left the requests and its arguments. What the
contract leaves open is not compared: which bytes make a name, which free block is taken.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from fractions import Fraction
from functools import wraps
from types import FunctionType
from typing import Any

from labs.kit.judge import isolate
from labs.kit.judge.compare import same
from labs.kit.judge.manifest import Lab
from labs.kit.judge.random_scripts import unknown
from labs.kit.judge.sentences import Sentence
from labs.kit.judge.sentences.operations import rule_for
from labs.kit.judge.sentences.words import NOTHING, pair, place, places, value
from labs.kit.toys import plays
from labs.kit.toys.words import kind

MOST, FEW = 4096, 16  # numbers of a tensor that are noted, and that are shown among arguments
SCALARS = (int, float, str, bool)
ANY_BLOCK = ("block_table", "slot_mapping", "take", "get_computed_blocks")  # only how many they return counts


class Words(str):
    """A text that stands in a sentence as it is, without quotes."""


@dataclass
class Call:
    """One call in words, what it returned or raised, and what could be seen after it."""

    words: str
    is_property: bool = False
    gave: Any = None
    raised: str = ""
    after: dict[str, Any] = field(default_factory=dict)


@dataclass
class Notes:
    """The calls that a test makes itself; those that they make are not noted."""

    calls: list[Call] = field(default_factory=list)
    inside: bool = False
    requests: dict[int, Any] = field(default_factory=dict)  # all that were seen so far, by identity
    names: dict[bytes, str] = field(default_factory=dict)  # bytes that were returned, and who did so first


class Noting:
    """A lab's file whose functions, and whose methods of classes with tasks, note their calls."""

    def __init__(self, part: Any, lab: Lab, notes: Notes):
        self._part, self._notes = part, notes
        self._classes = {isolate.class_of(task) for task in lab.tasks if "." in task.name}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if isinstance(found, FunctionType):
            return noting(found, name, self._notes)
        return noting_class(found, name, self._notes) if name in self._classes else found


def noting_class(cls: Any, title: str, notes: Notes) -> Any:
    """Return a subclass whose methods and properties note their calls."""
    titles = {"__init__": title, "__call__": title, "__next__": "next"}
    members: dict[str, Any] = {}
    inherited = {name: member for base in reversed(cls.__mro__[:-1]) for name, member in vars(base).items()}
    for name, member in inherited.items():
        if isinstance(member, FunctionType) and (name in titles or not name.startswith("_")):
            members[name] = noting(member, titles.get(name, name), notes, owned=True)
        elif isinstance(member, property) and member.fget and not name.startswith("_"):
            read = noting(member.fget, name, notes, owned=True, is_property=True)
            members[name] = property(read, member.fset, member.fdel)
    return type(cls.__name__, (cls,), members)


def noting(
    function: Callable[..., Any], title: str, notes: Notes, owned: bool = False, is_property: bool = False
) -> Callable[..., Any]:
    """Return the function; it notes its calls. The first argument of one that is `owned` is its object."""

    @wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if notes.inside:
            return function(*args, **kwargs)
        given = [*args[owned:], *kwargs.values()]
        words = [in_words(one) for one in args[owned:]] + [f"{k}={in_words(v)}" for k, v in kwargs.items()]
        call = Call(title if is_property else f"{title}({', '.join(words)})", is_property)
        notes.calls.append(call)
        notes.inside, result = True, None
        try:
            result = function(*args, **kwargs)
            call.gave = gave(result, call, notes)
            return result
        except Exception as error:
            call.raised = kind(error)
            raise
        finally:
            notes.inside = False
            call.after = left(args[:owned], given, result, notes)

    return noted


def gave(result: Any, call: Call, notes: Notes) -> Any:
    if isinstance(result, bytes):
        first = notes.names.setdefault(result, call.words)
        return Words("bytes of its own" if first == call.words else f"what {first} has returned")
    is_open = call.words.partition("(")[0] in ANY_BLOCK and isinstance(result, list)
    return Words(f"a list of {len(result)}") if is_open else seen(result)


def in_words(thing: Any) -> str:
    """Return an argument as a sentence shows it, short."""
    if hasattr(thing, "numel") and thing.numel() > FEW:
        return f"a tensor {tuple(thing.shape)}"
    if is_dataclass(thing) and not hasattr(thing, "request_id"):
        said = [(one.name, getattr(thing, one.name), one.default) for one in fields(thing)]
        own = [f"{name}={now}" for name, now, default in said if isinstance(now, SCALARS) and now != default]
        return f"{type(thing).__name__}({', '.join(own)})"
    said, kind_of = seen(thing), type(thing).__name__
    return f"the {kind_of}" if said == f"<{kind_of}>" else value(said)


def seen(thing: Any) -> Any:
    """Return a value as JSON has it: of a tensor its numbers, of a request its id, else the type."""
    try:
        return json.loads(json.dumps(thing, default=plain))
    except (TypeError, ValueError, RecursionError):
        return f"<{type(thing).__name__}>"


def plain(thing: Any) -> Any:
    if hasattr(thing, "request_id"):
        return thing.request_id
    if hasattr(thing, "numel"):
        return thing.tolist() if thing.numel() <= MOST else unknown(thing)
    if isinstance(thing, Fraction):
        return float(thing)
    return thing.value if isinstance(thing, Enum) else unknown(thing)


def left(owner: Sequence[Any], arguments: Sequence[Any], result: Any, notes: Notes) -> dict[str, Any]:
    """Return what can be seen after a call: its arguments, its object's lists, and all requests so far."""
    public = {name: one for this in owner for name, one in vars(this).items() if not name.startswith("_")}
    lists = {name: one for name, one in public.items() if is_requests(one)}
    after: dict[str, Any] = {name: seen([*one]) for name, one in lists.items()}
    after |= {f"argument {number}": seen(one) for number, one in enumerate(arguments, 1)}
    if hasattr(public.get("kv"), "num_free_blocks"):
        after["num_free_blocks"] = public["kv"].num_free_blocks
    here = [*arguments, *(result if is_requests(result) else ()), *(r for one in lists.values() for r in one)]
    notes.requests |= {id(one): one for one in here if is_requests([one])}
    for request in notes.requests.values():
        for key, one in plays.plain(request).items():
            after.setdefault(key, {})[request.request_id] = seen(one)
    return after


def is_requests(thing: Any) -> bool:
    """Whether this is a list of requests, a queue of them, or one that is empty."""
    is_list = hasattr(thing, "__iter__") and hasattr(thing, "__len__") and not isinstance(thing, str | dict)
    return is_list and all(hasattr(one, "prompt_token_ids") for one in thing)


def sentence(yours: Sequence[Call], reference: Sequence[Call]) -> Sentence | None:
    """Return the sentence on the first call that gives something else; None if the calls part before."""
    before = ""
    for mine, other in zip(yours, reference, strict=False):
        if mine.words != other.words:
            return None
        call = f"Your {mine.words}"
        if mine.raised != other.raised:
            return Sentence("raised", f"{call} {how(mine)}", f"the reference {how(other)}")
        if not mine.raised and not same(mine.gave, other.gave):
            a, b = differing(mine.gave, other.gave)
            if mine.is_property:
                after = f"After your {before}, {mine.words} is {a}"
                return Sentence("returned", after, f"in the reference {b}")
            return Sentence("returned", f"{call} returns {a}", f"the reference returns {b}")
        for path, *both in places(mine.after, other.after):
            if NOTHING not in both:  # an attribute of the file's own
                (a, b), name = differing(*both), str(path[0])
                rule = "queue" if name in ("running", "waiting") else rule_for(name)
                if "argument" in name:  # the reference may have changed it as well
                    rule = "field"
                return Sentence(rule, f"After your {mine.words}, {at(path)} is {a}", f"in the reference {b}")
        before = before if mine.is_property else mine.words
    return None


def at(path: tuple[object, ...]) -> str:
    """Return such a place in words: "the arrival of r1", "waiting", "argument 2, place 0"."""
    return f"the {place(path)}" if len(path) == 2 and isinstance(path[1], str) else place(path)


def differing(yours: Any, reference: Any) -> tuple[str, str]:
    """Return two values that differ, in words: whole if they are short, else the first place that differs."""
    if isinstance(yours, Words) or isinstance(reference, Words):
        return str(yours), str(reference)
    both = pair(yours, reference)
    path, a, b = next(places(yours, reference))
    return (f"{value(a)} at {place(path)}", value(b)) if path and "..." in "".join(both) else both


def how(call: Call) -> str:
    if call.raised:
        return f"raises {call.raised}"
    return "returns" if call.gave is None else f"returns {differing(call.gave, NOTHING)[0]}"
