"""A graded file may import its lab's list and look at nothing of the grader: one clear error where it tries."""

# ruff: noqa: E501  an attack in a line each

import textwrap

import pytest

from labs.kit.grader import blame, imports
from labs.kit.grader.cases import cases, play
from labs.kit.grader.grading import box
from labs.kit.grader.submission import Settings
from labs.kit.judge.manifest import find_lab, lab_ids, replace_body
from labs.kit.tests import marks
from labs.kit.tests.files import graded, solution

pytestmark = [marks.namespaces, pytest.mark.usefixtures("few_cases")]

REFUSED = """_ctypes _thread _xxsubinterpreters asyncio atexit base64 builtins codecs concurrent.futures ctypes dis faulthandler
    gc importlib importlib.util importlib.machinery inspect io linecache logging marshal mmap multiprocessing os pathlib pickle
    pkgutil platform posix pty resource runpy shelve shutil signal site socket sqlite3 ssl subprocess sys sysconfig tempfile
    threading timeit tokenize trace traceback tracemalloc types.os unittest urllib.request xml zipimport zlib
    pytest rich typer labs labs.kit labs.kit.judge.loading labs.kit.grader.player
    mini_engine.block_manager mini_engine.engine mini_engine.fast.attention mini_engine.prefix_cache""".split()

LOOKS = {  # an expression, and the word of the error
    "frames, by an error": ("caught().__traceback__.tb_frame", "may not look at tb_frame"),
    "frames, by a getter": (
        "operator.attrgetter('tb_frame')(caught().__traceback__)",
        "may not look at tb_frame",
    ),
    "frames, by copy": (
        "copy.copy(Reduced(getattr, caught().__traceback__, 'tb_frame'))",
        "may not look at tb_frame",
    ),
    "frames, by a field": ("made(lambda: caught().__traceback__.tb_frame)", "may not look at tb_frame"),
    "frames, by a sort": (
        "sorted([caught().__traceback__], key=lambda t: t.tb_frame)",
        "may not look at tb_frame",
    ),
    "frames, by a reduction": (
        "functools.reduce(getattr, ['__traceback__', 'tb_frame'], caught())",
        "tb_frame",
    ),
    "frames, by code that says it is the grader's": (
        "types.FunctionType(frame_of.__code__.replace(co_filename='/course/labs/kit/x.py'), {})(caught())",
        "may not look at code.__new__",
    ),
    "a generator's frame": ("(x for x in ()).gi_frame", "may not look at gi_frame"),
    "a generator's code": ("(x for x in ()).gi_code", "may not look at gi_code"),
    "the library's sys": ("dataclasses.sys", "no attribute 'sys'"),
    "the library's private sys": ("collections._sys", "no attribute '_sys'"),
    "the library's os": ("random._os", "no attribute '_os'"),
    "the library's inspect": ("dataclasses.inspect", "no attribute 'inspect'"),
    "the library's builtins": ("functools.builtins", "no attribute 'builtins'"),
    "the engine's lazy parts": ("mini_engine.Engine", "no attribute 'Engine'"),
    "the engine's other modules": ("mini_engine.trace", "no attribute 'trace'"),
    "a view's real module": ("dataclasses.__spec__", "no attribute '__spec__'"),
    "exec": ("exec('import os')", "may not call exec()"),
    "eval": ("eval('1')", "may not call eval()"),
    "compile": ("compile('1', '/course/labs/kit/x.py', 'eval')", "may not call compile()"),
    "open": ("open('/course/labs/lab-01/author/lab.toml')", "may not call open()"),
    "input": ("input()", "may not call input()"),
    "__import__": ("__import__('sys')", "may not import sys"),
    "a spoofed __import__": ("__import__('sys', {'__name__': 'os'}, None, ('path',))", "may not import sys"),
    "the builtins' __import__": ("__builtins__['__import__']('os')", "may not import os"),
    "a relative import": (
        "__import__('judge', {'__package__': 'labs.kit'}, None, ('x',), 1)",
        "may not import .judge",
    ),
}
TOOLS = """
import collections, copy, dataclasses, functools, operator, random, types
import mini_engine.request

def frame_of(error):
    return error.__traceback__.tb_frame

class Reduced:
    def __init__(self, *call):
        self.call = call
    def __reduce_ex__(self, _):
        return self.call[0], self.call[1:]

def caught():
    try:
        raise ValueError
    except ValueError as error:
        return error

def made(factory):
    return dataclasses.make_dataclass("Made", [("field", object, dataclasses.field(default_factory=factory))])()

"""


def test_what_is_not_on_the_list_is_refused_by_name():
    tries = "".join(
        f"try:\n    import {name}\nexcept ImportError as error:\n"
        f"    assert 'a graded file may not import {name}: lab-01 ' in str(error), error\n"
        f"else:\n    raise AssertionError({name!r})\n"
        for name in REFUSED
    )
    lab = graded("lab-01", tries + solution("lab-01"))
    assert lab.earned == 100, lab.problem


def test_the_student_reads_which_import_it_was():
    for name in ("os", "mini_engine.block_manager"):
        lab = graded("lab-01", f"import {name}\n" + solution("lab-01"))
        why = f"starter.py does not load: ImportError: a graded file may not import {name}: lab-01"
        assert lab.earned == 0 and lab.problem.startswith(why)


def test_what_is_not_to_be_looked_at_is_refused():
    """At import, and in a call, where the kit's frames are below."""
    tries = [
        f"try:\n    {look}\nexcept Exception as error:\n    assert {word!r} in str(error), ({name!r}, error)\n"
        f"else:\n    raise AssertionError({name!r})\n"
        for name, (look, word) in LOOKS.items()
    ]
    code = "".join(tries)
    lab = graded("lab-01", TOOLS + code + solution("lab-01"))
    assert lab.earned == 100, lab.problem
    inside = f"{solution('lab-01')}\n{TOOLS}\nhonest = schedule_step\ndef schedule_step(*args, **options):\n"
    lab = graded("lab-01", f"{inside}{textwrap.indent(code, '    ')}    return honest(*args, **options)\n")
    assert lab.earned == 100, [case.said for case in lab.cases if not case.passed][:1]


HARMLESS = """
from collections import abc, namedtuple
from typing import NamedTuple
import collections.abc as also, enum, dataclasses, functools, math, random
from mini_engine import RequestStatus
from mini_engine.request import RequestStatus as same
assert also.Sized is abc.Sized and RequestStatus is same and math.inf > random.random()
Pair, Colour = namedtuple("Pair", "a b"), enum.Enum("Colour", "red blue")
class Line(NamedTuple):
    number: int = 0
@functools.total_ordering
@dataclasses.dataclass(eq=True)
class Item:
    number: int = 0
    def __lt__(self, other): return self.number < other.number
assert Item(1) > Item() and Line() == (0,) and Pair(1, 2).b == 2 and Colour.red.name == "red"
"""


def test_torch_may_be_imported_where_a_lab_has_tensors():
    """In lab-07 they come from the kit's models alone."""
    with_torch = [lab_id for lab_id in lab_ids() if "torch" in imports.allowed(find_lab(lab_id))]
    assert with_torch == ["lab-04", "lab-05", "lab-07", "lab-08"]


def importing(lab_id: str) -> str:
    """Return code that imports all that a lab's file may import, and uses some of it."""
    lab = find_lab(lab_id)
    names = imports.allowed(lab)
    assert {*imports.imported(solution(lab_id))} <= {*names} and ("torch" in names) == lab.uses_torch
    lines = (f"    import {name}\n" for name in names if name != "__future__")  # as torch belongs there
    return f"\ndef imports():\n{''.join(lines)}imports()\n{HARMLESS}"


ESCAPED = """
import collections
modules = collections.namedtuple.__globals__["_sys"].modules  # the list of imports keeps nobody from this
load, os = modules["builtins"].__import__, modules["os"]

def found(name):
    # a folder without files is a module without names
    try:
        return [key for key in vars(load(name, fromlist=["it"])) if not key.startswith("__")]
    except ImportError:
        return []

def answers(value, task):
    for part in task.split("."):
        value = getattr(value, part, None)
    code = getattr(value, "__code__", None)
    ours = code and code.co_filename.startswith("/course") and "/author/" not in code.co_filename
    return ours and not any("not available here" in str(one) for one in code.co_consts)
"""
EVERY = (
    "labs.kit.grader.sandbox labs.kit.author.check mini_engine.llm mini_engine.sim llguidance transformers"
)
ANSWERS = {  # modules that answer a lab, or come near it, beside the stubs in its place
    "lab-04": "mini_engine.fast.attention mini_engine.backends.two_pass",
    "lab-05": "mini_engine.block_manager mini_engine.prefix_cache mini_engine.fast.attention mini_engine.engine",
    "lab-06": "mini_engine.block_manager mini_engine.prefix_cache",
    "lab-08": "mini_engine.sampler mini_engine.speculative.rejection_sampler",
    "lab-09": """mini_engine.structured.automaton mini_engine.structured.grammar mini_engine.structured.guidance
        mini_engine.structured.logits""",
    "lab-10": """mini_engine.speculative.ngram mini_engine.speculative.draft_model mini_engine.sampler
        mini_engine.speculative.rejection_sampler mini_engine.speculative.adaptive mini_engine.backends.draft""",
    "lab-11": "mini_engine.async_engine mini_engine.serve.app mini_engine.serve.api labs.kit.tensor_toys.front",
}


def escaping(lab_id: str) -> str:
    """Return code that gets around the list, and finds no answer: the course lies empty, and only what the
    lab's scripts need is in memory, with stubs in place of what it asks for."""
    names = [*(EVERY.split() if lab_id != "lab-07" else ()), *ANSWERS.get(lab_id, "").split()]
    asked = [task.name for task in find_lab(lab_id).tasks]
    return f"""{ESCAPED}
there = {{name: some for name in {names} if (some := found(name))}}
assert not there and os.listdir("/course") == [], there
ours = [one for name, one in [*modules.items()] if name.startswith(("labs", "mini_engine"))]
there = [(module, task) for module in ours for task in {asked} if answers(module, task)]
assert not there, there
try:
    os.mkdir("/course/left")
except OSError:
    pass
else:
    raise AssertionError("a word for the next batch")
"""


WRAPPERS = {  # a task answered by private names of the engine
    ("lab-09", "TokenIndex.find_live"): """
        from mini_engine.structured.grammar import TokenIndex, TokenTrie
        twin = TokenIndex.__new__(TokenIndex)
        twin.dfa, twin.vocabulary, twin.eos_token_id = self.dfa, self.vocabulary, self.eos_token_id
        twin.trie = TokenTrie(self.vocabulary, self.eos_token_id)
        return set(twin._live)""",
    ("lab-10", "rejection_sample"): """
        accept = load("mini_engine.speculative.rejection_sampler", fromlist=["it"]).accept
        accept.__globals__["residual"] = residual
        for i, token_id in enumerate(draft_token_ids):
            if (said := accept(token_id, target[i], draft[i], chance)) != token_id:
                return [*draft_token_ids[:i], said]
        return [*draft_token_ids, chance.draw(target[len(draft_token_ids)])]""",
}


@pytest.mark.parametrize(("lab_id", "task"), WRAPPERS)
def test_a_wrapper_over_the_engines_private_names_earns_nothing(lab_id, task):
    wrapped = replace_body(solution(lab_id), task, WRAPPERS[lab_id, task])
    lab = graded(lab_id, ESCAPED + wrapped)
    assert [one.task for one in lab.tasks if not one.earned] == [task]


READS = {
    "its constants": "next_chunk.__code__.co_consts",
    "its names, by a getter": "operator.attrgetter('__code__')(next_chunk)",
    "its code, by copy": "copy.copy(Reduced(getattr, next_chunk, '__code__'))",
}


@pytest.mark.parametrize("reads", READS)
def test_a_task_that_is_judged_alone_cannot_read_the_references_code(reads):
    lab = find_lab("lab-02")
    settings = Settings(("lab-02",), "a seed", hidden=0, seconds=5.0)
    source = TOOLS + replace_body(solution("lab-02"), "clamp", f"raise ValueError(repr({READS[reads]}))")
    scripts, sandbox = cases(lab, settings)[:5], box(lab, settings)
    judge = blame.Blame(lab, source, (), (), play(sandbox, source, scripts), sandbox)
    answer = judge.play([lab.task("clamp")], scripts)
    raised = {step.seen.get("raised") for log in answer.logs for step in log}
    assert "PermissionError" in raised and "ValueError" not in raised
