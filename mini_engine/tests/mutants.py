"""Mutation testing of the engine's core: one small thing is made wrong, and a test must notice.

    python -m mini_engine.tests.mutants [MODULE ...] [--alive] [--jobs N]     `make mutants`

Each mutant runs in a fork of one process that has pytest and torch loaded, so that it takes a second and
not ten. Survivors are listed; those that may survive stand with their reason in mutants.toml.

Why not a library: mutmut removes no statement, negates no condition and leaves out what is under a decorator
(half of these mutants), and has no place for reasons; cosmic-ray starts a process a mutant, and removes none.
"""

import argparse
import ast
import copy
import gc
import multiprocessing
import os
import resource
import signal
import sys
import time
import tomllib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import wait
from pathlib import Path
from types import CodeType

import hypothesis  # noqa: F401, here and below: loaded once, for all forks
import pytest
import torch

TESTS = Path(__file__).parent
# By module the test files that cover it, those first that are quick and find most. Left out is what measures
# time, and what starts processes, which would read the module's own file.
STEPS = ["within_step", "speculation"]  # a step that shares what it computes, or several tokens a row
ENGINE = ["engine", "llm", "speculation", "every_call", "isolation", "async_engine", "faults", "input_errors"]
TEXTS = ["within_step", "structured", "oracle_sampling", "speculation_equality", "conformance"]
COVER = {
    "scheduler": ["scheduler", "invariants", *STEPS, "every_call", "isolation", "conformance", "faults"],
    "schedule_step": ["scheduler", "invariants", *STEPS, "conformance", "faults"],
    "request_queue": ["scheduler", "invariants"],
    "block_manager": ["block_manager", "fork", *STEPS, "invariants", "conformance", "faults", "renamed"],
    "prefix_cache": ["block_manager", "fork", *STEPS, "invariants", "conformance", "faults"],
    "batch": ["batch", "paged_attention"],
    "attention": ["paged_attention", "batch", "within_step", "fork"],
    "sampler": ["sampler", "lab-08", "oracle_sampling"],
    "engine": ENGINE,
    "input_processor": ["input_processor", *reversed(ENGINE), *TEXTS],
    "output_processor": ["output_processor", *ENGINE[:3], *TEXTS, *ENGINE[3:]],
    "recovery": [*ENGINE[:3], *TEXTS, *ENGINE[3:]],
    "speculative.adaptive": ["speculation"],
    **dict.fromkeys(("speculative.ngram", "speculative.verify"), ["lab-10", "speculation"]),
    **dict.fromkeys(
        ("speculative.draft_model", "speculative.rejection_sampler"), ["lab-10", "sampler", "speculation"]
    ),
    **dict.fromkeys(("structured.automaton", "structured.grammar"), ["lab-09", "structured"]),
    **dict.fromkeys(
        [f"structured.{name}" for name in ("nodes", "patterns", "logits", "choose")], ["structured"]
    ),
    "async_engine": ["async_engine", "lab-11"],
}
LEFT_OUT = (
    "not (hash_seeds or cost_little or costs_the_same or does_not_search or importing_the_package or smollm2 "
    "or chat_model or embedded_model)"
)
ENOUGH, FEW = 0.95, 5  # so much of a module must be killed, or all but so many, whatever the reasons
CPU = 8  # seconds of the processor for one test; the longest takes one
WALL = 200  # seconds for a mutant that waits for something; a survivor takes up to 60
OUT = Path("out/mutants")  # pytest's output for the original, and the survivors of the last run
# By pytest's exit code; a signal is "late", and any other code "broken": it cannot even be imported.
OUTCOMES = {0: "alive", 1: "failed", 5: "no tests"}

# Operators that are exchanged, by ast's names: in both directions, and in one.
SWAPS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, And Or, Add Sub, BitAnd BitOr"
ONE_WAY = "Lt Gt, LtE Gt, Gt Lt, GtE Lt, Mult Add, FloorDiv Mult, Div Mult, Mod FloorDiv"
OTHERS = [tuple(getattr(ast, name) for name in pair.split()) for pair in f"{SWAPS}, {ONE_WAY}".split(", ")]
OTHERS += [(there, one) for one, there in OTHERS[: SWAPS.count(",") + 1]]
OPPOSITES = ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn


@dataclass
class Mutant:
    module: str
    line: int
    statement: str  # before -> after, as in mutants.toml
    code: CodeType


def mutants(module: str) -> list[Mutant]:
    """Every change of one place, in the order of the file."""
    file, found = TESTS.parent / f"{module.replace('.', '/')}.py", []
    tree = ast.parse(file.read_text("utf-8"))
    for node, statement in places(tree):
        before, kind, fields = first_line(statement), type(node), vars(node)
        for new in list(changes(node)):
            node.__class__, node.__dict__ = type(new), vars(new)
            code = compile(ast.fix_missing_locations(tree), file, "exec")
            found.append(Mutant(module, statement.lineno, f"{before} -> {first_line(statement)}", code))
            node.__class__, node.__dict__ = kind, fields
    return sorted(found, key=lambda mutant: mutant.line)


def places(tree: ast.AST, statement: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Nodes that can be changed, neither types nor texts, with the statement around each."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list") or isinstance(tree, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not is_for_types(child):
                around = child if isinstance(child, ast.stmt) else statement
                yield child, around
                yield from places(child, around)


def first_line(statement: ast.AST) -> str:
    return " ".join(ast.unparse(statement).split("\n", 1)[0].split())


def is_for_types(node: ast.AST) -> bool:
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} if isinstance(node, ast.stmt) else set()
    return (isinstance(node, ast.If) and "TYPE_CHECKING" in names) or (
        isinstance(node, ast.Assign) and bool(names & {"Callable", "Literal", "TypeVar", "__all__"})
    )


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield copies of a node, each with one thing wrong."""

    def but(**fields):
        new = copy.copy(node)
        new.__dict__.update(fields)
        return new

    match node:
        case ast.Compare():
            for i, op in enumerate(node.ops):
                for wrong in swapped(op):
                    yield but(ops=[*node.ops[:i], wrong, *node.ops[i + 1 :]])
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp():
            yield from (but(op=wrong) for wrong in swapped(node.op))
        case ast.UnaryOp(op=ast.USub()):
            yield but(op=ast.UAdd())
        case ast.Constant(value=bool()):
            yield but(value=not node.value)
        case ast.Constant(value=int()):
            yield from (but(value=node.value + 1), but(value=node.value - 1))
        case ast.comprehension():
            for i, test in enumerate(node.ifs):
                for wrong in negated(test):
                    yield but(ifs=[*node.ifs[:i], wrong, *node.ifs[i + 1 :]])
        case ast.For():
            yield but(iter=ast.Tuple([], ast.Load()))
        case ast.If() | ast.While() | ast.IfExp():
            yield from (but(test=wrong) for wrong in negated(node.test))
        case ast.Break() | ast.Continue():
            yield ast.copy_location(ast.Continue() if isinstance(node, ast.Break) else ast.Break(), node)
        case ast.Return(value=ast.AST()) if ast.unparse(node) != "return None":
            yield but(value=ast.Constant(None))
    is_call = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    if is_call or isinstance(node, ast.Assign | ast.AugAssign | ast.Delete | ast.Raise):
        yield ast.copy_location(ast.Pass(), node)


def swapped(op: ast.AST) -> Iterator[ast.AST]:
    return (there() for one, there in OTHERS if one is type(op))


def negated(test: ast.AST) -> list[ast.AST]:
    """Return the negated test; nothing where a change of its operator negates it already."""
    is_opposite = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], OPPOSITES)
    return [] if is_opposite else [ast.UnaryOp(ast.Not(), test)]


def run(mutants: Sequence[Mutant | None], tests: list[str], jobs: int) -> Iterator[tuple[Mutant | None, str]]:
    """Yield the outcome of each mutant; None is the original."""
    gc.freeze()  # else each fork's first collection copies all that is here, the mutants too
    left, going = deque(mutants), {}
    while left or going:
        while left and len(going) < jobs:
            mutant = left.popleft()
            child = multiprocessing.get_context("fork").Process(target=judge, args=(mutant, tests))
            child.start()
            going[child.sentinel] = child, mutant
        for sentinel in wait(going):
            child, mutant = going.pop(sentinel)
            child.join()
            yield mutant, "late" if child.exitcode < 0 else OUTCOMES.get(child.exitcode, "broken")


class TimeLimit:
    """Ends the process in a test that loops for ever."""

    def pytest_runtest_setup(self) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + CPU, resource.RLIM_INFINITY))


def judge(mutant: Mutant | None, tests: list[str]) -> None:
    """In the fork: pytest, quiet, to the first failure; its exit code is the process's."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    signal.alarm(WALL)
    resource.setrlimit(resource.RLIMIT_DATA, (3 * 2**30, 3 * 2**30))
    TimeLimit().pytest_runtest_setup()
    original = SourceFileLoader.get_code
    if mutant:
        names = {f"mini_engine.{mutant.module}": mutant.code}
        SourceFileLoader.get_code = lambda self, name: names.get(name) or original(self, name)
    quiet = os.open(os.devnull if mutant else OUT / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "LAB_IMPL": "engine"}
    options = ["-x", "-p", "no:cacheprovider", f"--tb={'no' if mutant else 'short'}", "-k", LEFT_OUT]
    code = 0
    for some in (tests[:1], tests[1:]):  # the first file notices most, and the others need not be read
        if some and not code:
            code = pytest.main([*options, *map(file_of, some)], [TimeLimit()])
    os._exit(code)


def file_of(name: str) -> str:
    """Return the path of a test file: the engine's own, or a lab's, which then judges the engine's parts."""
    if name.startswith("lab-"):
        return f"{TESTS.parents[1]}/labs/{name}/test_lab.py"
    return f"{TESTS}/test_{name}.py"


def try_out(module: str, alive: bool, jobs: int) -> bool:
    """Run a module's mutants, or those alive when last tried; print survivors. Return whether all is well."""
    drawn, file = mutants(module), OUT / module
    if alive:
        known = file.read_text("utf-8").splitlines() if file.exists() else []
        drawn = [mutant for mutant in drawn if mutant.statement in known]
    ((_, outcome),) = run([None], COVER[module], 1)
    if outcome != "alive":
        raise SystemExit(f"{module}: its tests do not pass without any mutant ({outcome}): {OUT / 'log'}")
    outcomes = list(run(drawn, COVER[module], jobs))
    living = {mutant.statement: mutant.line for mutant, outcome in outcomes if outcome == "alive"}
    file.write_text("".join(f"{statement}\n" for statement in living), "utf-8")
    counts = dict(Counter(outcome for _, outcome in outcomes))
    killed = 1 - counts.get("alive", 0) / max(1, len(drawn))
    print(f"{module}: {len(drawn)} mutants, {counts}: {killed:.1%} killed")
    reasons = tomllib.loads((TESTS / "mutants.toml").read_text("utf-8")).get(module, {})
    for statement, line in living.items():
        print(f"  alive, line {line}: {statement}\n      {reasons.get(statement, 'NO TEST NOTICES')}")
    for statement in () if alive else reasons.keys() - living.keys():
        print(f"  in mutants.toml, but noticed: {statement}")
    sys.stdout.flush()
    is_enough = killed >= ENOUGH or counts.get("alive", 0) <= FEW
    return living.keys() <= reasons.keys() and (alive or is_enough)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=", ".join(COVER))
    parser.add_argument("--alive", action="store_true", help="only those that survived when last tried")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="so many at a time")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    import mini_engine.llm  # noqa: F401  # what the engine loads; the engine itself each fork imports anew

    for name in [name for name in sys.modules if name.partition(".")[0] in ("mini_engine", "labs")]:
        del sys.modules[name]
    OUT.mkdir(parents=True, exist_ok=True)
    return 0 if all([try_out(module, args.alive, args.jobs) for module in args.modules or COVER]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
