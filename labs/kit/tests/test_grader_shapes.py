"""Right solutions of odd shapes earn all points: what Python lets a student write is no fault."""

import pytest

from labs.kit.grader import intake
from labs.kit.tests import marks
from labs.kit.tests.files import another, graded, solution

pytestmark = [marks.namespaces, pytest.mark.usefixtures("few_cases")]

SHAPES = {  # after the reference, whose function is `honest`
    "a dataclass": """
from dataclasses import dataclass, field
@dataclass(slots=True)
class Step:
    given: dict = field(default_factory=dict)
    def __call__(self, *args, **options):
        return {**self.given, **honest(*args, **options)}
def schedule_step(*args, **options):
    return Step()(*args, **options)""",
    "a generator": """
def pairs(*args, **options):
    yield from honest(*args, **options).items()
def schedule_step(*args, **options):
    return dict(pairs(*args, **options))""",
    "numpy integers of 64 and 32 bits": """
import itertools
import numpy as np
KINDS = itertools.cycle([np.int64, np.int32])
def schedule_step(*args, **options):
    return {key: next(KINDS)(value) for key, value in honest(*args, **options).items()}""",
    "match": """
def schedule_step(*args, **options):
    match (args, options):
        case ((waiting, running, kv), dict()):
            return honest(waiting, running, kv, **options)
        case _:
            return honest(*args, **options)""",
    "inheritance": """
from abc import ABC, abstractmethod
class Base(ABC):
    @abstractmethod
    def step(self, *args, **options): ...
class Mine(Base):
    def step(self, *args, **options):
        return honest(*args, **options)
schedule_step = Mine().step""",
    "a cache of the module": """
import functools
@functools.lru_cache(maxsize=None)
def least(a, b):
    return min(a, b)
SEEN = {}
def schedule_step(*args, **options):
    found = honest(*args, **options)
    return {key: SEEN.setdefault(value, least(value, value)) for key, value in found.items()}""",
    "a partial of a decorated closure over a lambda": """
import functools
def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **options):
        print("called", options)
        return function(*args, **options)
    return wrapper
def made(function):
    count = 0
    def schedule_step(*args, **options):
        nonlocal count
        count += 1
        return function(*args, **options)
    return schedule_step
schedule_step = functools.partial(logged(made(lambda *args, **options: honest(*args, **options))))""",
    "dicts of other kinds": """
import itertools
from collections import Counter, OrderedDict, defaultdict
KINDS = itertools.cycle([OrderedDict, Counter, lambda found: defaultdict(int, found)])
def schedule_step(*args, **options):
    return next(KINDS)(honest(*args, **options))""",
    "a coroutine": """
async def later(*args, **options):
    return honest(*args, **options)
def schedule_step(*args, **options):
    try:
        later(*args, **options).send(None)
    except StopIteration as done:
        return done.value""",
    "a context manager": """
from contextlib import contextmanager
@contextmanager
def opened(*args, **options):
    yield honest(*args, **options)
def schedule_step(*args, **options):
    with opened(*args, **options) as found:
        return found""",
    "an enum and a named tuple": """
import enum
from typing import NamedTuple
class Kind(enum.IntEnum):
    one = 1
class Row(NamedTuple):
    key: str
    value: int
def schedule_step(*args, **options):
    rows = [Row(key, value * Kind.one) for key, value in honest(*args, **options).items()]
    return {row.key: row.value for row in rows}""",
    "letters beyond ASCII": """
def größe(*args, **options):
    return honest(*args, **options)
schedule_step = größe""",
    "a metaclass": """
class Meta(type):
    def __call__(cls, *args, **options):
        return honest(*args, **options)
class schedule_step(metaclass=Meta):
    pass""",
    "recursion": """
def copied(items):
    return {} if not items else {items[0][0]: items[0][1], **copied(items[1:])}
def schedule_step(*args, **options):
    return copied([*honest(*args, **options).items()])""",
    "types that are written": """
from __future__ import annotations
from typing import Any, Generic, Protocol, TypeVar
T = TypeVar("T")
class Box(Generic[T]):
    def __init__(self, value: T) -> None: self.value = value
class Steps(Protocol):
    def __call__(self, *args: Any, **options: Any) -> dict[str, int]: ...
def schedule_step(*args: Any, **options: Any) -> dict[str, int]:
    return Box(honest(*args, **options)).value""",
}
LATER = {  # of other labs, after the reference
    ("lab-08", "numpy's numbers"): """
import functools
import numpy as np
def as_numpy(function):
    @functools.wraps(function)
    def wrapper(*args, **options):
        found = function(*args, **options)
        return [*map(np.float64, found)] if isinstance(found, list) else np.int64(found)
    return wrapper
for name in "penalties temperature min_p top_k top_p".split():
    globals()["apply_" + name] = as_numpy(globals()["apply_" + name])
for name in ("probabilities", "draw"):
    globals()[name] = as_numpy(globals()[name])""",
    ("lab-08", "a sampler that inherits, with slots and a generator"): """
Reference = Sampler
class Sampler(Reference):
    __slots__ = ("calls",)
    def uniform(self, request, index):
        *_, last = (Reference.uniform(self, request, i) for i in range(index + 1))
        return last
    def __call__(self, logits, requests):
        self.calls = len(requests)
        return [int(token) for token in Reference.__call__(self, logits, requests)]""",
    ("lab-09", "single dispatch and frozen sets"): """
import functools
@functools.singledispatch
def nullable(node): return False
@nullable.register
def _(node: Empty): return True
@nullable.register
def _(node: Repeat): return True
@nullable.register
def _(node: Sequence): return nullable(node.first) and nullable(node.second)
@nullable.register
def _(node: Either): return any(map(nullable, node.options))
built = build_dfa
def build_dfa(node, max_states=MAX_STATES):
    rows, accepting = built(node, max_states)
    return Dfa(tuple(rows), frozenset(accepting))""",
    ("lab-09", "a grammar of another class, with a property"): """
Reference = RegexGrammar
class RegexGrammar(Reference):
    @property
    def current(self): return self.states[-1]
    def accept_tokens(self, token_ids):
        match [*token_ids]:
            case []: return True
            case _: return super().accept_tokens(tuple(token_ids))
    def validate_tokens(self, token_ids):
        return [*super().validate_tokens(iter(token_ids))]""",
    ("lab-10", "a frozen dataclass and a generator"): """
from dataclasses import dataclass
@dataclass(frozen=True, slots=True)
class NgramProposer:
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 3
    num_speculative_tokens: int = 4
    def propose(self, request):
        text, k = request.token_ids(), self.num_speculative_tokens
        for n in reversed(range(self.prompt_lookup_min, self.prompt_lookup_max + 1)):
            places = (i for i in reversed(range(len(text) - n)) if text[i : i + n] == text[-n:])
            if (at := next(places, None)) is not None:
                return text[at + n : at + n + k]
        return []
def said(request, rows, sample):
    for i, row in enumerate(rows):
        yield (token := sample(row, len(request.output_token_ids) + i))
        if [token] != request.spec_token_ids[i : i + 1]:
            return
def verify(request, rows, sample): return [*said(request, rows, sample)]""",
    ("lab-10", "recursion, a lambda and numpy's integers"): """
import numpy as np
def rejection_sample(drafts, target, draft, chance):
    if not drafts:
        return [chance.draw(target[0])]
    token, *rest = drafts
    if chance.flip(min(1, target[0][token] / draft[0][token])):
        return [token, *rejection_sample(rest, target[1:], draft[1:], chance)]
    return [chance.draw(residual(target[0], draft[0]))]
counted = rewind
rewind = lambda request, token_ids, kv: np.int64(counted(request, token_ids, kv))""",
}
FORMS = {  # of a file, as bytes
    "ends of lines as in Windows": lambda text: text.replace("\n", "\r\n").encode(),
    "a byte order mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "Latin-1": lambda text: f"# coding: latin-1\n{text}\nname = 'Zoë'\n".encode("latin-1", "replace"),
    "an editor's cookie": lambda text: ("# vim: set fileencoding=cp1252 :\n" + text).encode("cp1252"),
    "tabs": lambda text: text.replace("    ", "\t").encode(),
}


def shaped(shape: str) -> str:
    code = SHAPES[shape]
    future = "from __future__ import annotations\n"
    head = future if future in code else ""
    return f"{head}{solution('lab-01')}\nhonest = schedule_step\n{code.replace(future, '')}\n"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_right_solution_of_this_shape_earns_all(shape):
    lab = graded("lab-01", shaped(shape), hidden=10)
    assert lab.earned == 100, lab.problem or [case.said for case in lab.cases if not case.passed][:1]


@pytest.mark.parametrize(("lab_id", "shape"), LATER)
def test_a_right_solution_of_a_later_lab_earns_all_in_this_shape(lab_id, shape):
    lab = graded(lab_id, solution(lab_id) + LATER[lab_id, shape], hidden=10)
    assert lab.earned == lab.points, lab.problem or [case.said for case in lab.cases if not case.passed][:1]


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_this_form_earns_all(tmp_path, form):
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann/lab-01.py").write_bytes(FORMS[form](another("lab-01")))
    ((entry,), _) = intake.entries(tmp_path)
    lab = graded("lab-01", intake.read(entry, ["lab-01"]).files["lab-01"], hidden=10)
    assert lab.earned == 100, lab.problem
