"""Mutation testing of the engine's core: one small thing is made wrong, and a test must notice.

    python -m mini_engine.tests.mutants [MODULE ...] [--sample N] [--alive] [--jobs N]

Each mutant runs in a fork of one process that has pytest and torch loaded, so that it takes a second and
not ten. What stays alive is listed; what may, stands with its reason in mutants.toml. `make mutants`.
"""

import argparse
import ast
import copy
import gc
import os
import random
import resource
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType

import hypothesis  # noqa: F401, here and below: loaded once, for all forks
import pytest
import torch  # noqa: F401

TESTS = Path(__file__).parent
ENGINE = TESTS.parent
# By module the tests that cover it, those first that are quick and find most. Left out is what measures time,
# and what starts processes, which would read the module's own file.
COVER = {
    "scheduler": ["test_scheduler.py", "test_invariants.py", "test_conformance.py", "test_faults.py"],
    "block_manager": ["test_block_manager.py", "test_invariants.py", "test_conformance.py", "test_faults.py"],
    "batch": ["test_batch.py", "test_paged_attention.py"],
    "attention": ["test_paged_attention.py", "test_batch.py"],
    "sampler": ["test_sampler.py"],
    "engine": ["test_engine.py", "test_llm.py", "test_faults.py"],
}
LEFT_OUT = (
    "not (hash_seeds or cost_little or costs_the_same or does_not_search or importing_the_package or smollm2)"
)
ENOUGH = 0.95
CPU = 8  # seconds of the processor for one test; the longest takes one
WALL = 600  # and for a mutant that waits for something
LOG = Path("out/mutants.log")  # what pytest said of the original
ALIVE = Path("out/mutants.alive")  # the keys of those that lived when they were last tried
# By what pytest returns, or by a signal that ended it. "broken" cannot even be imported.
OUTCOMES = {0: "alive", 1: "failed", 5: "no tests", "signal": "late"}

OTHERS: dict[type, list[type]] = {
    ast.Lt: [ast.LtE, ast.Gt],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.Lt],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
    ast.And: [ast.Or],
    ast.Or: [ast.And],
    ast.Add: [ast.Sub],
    ast.Sub: [ast.Add],
    ast.Mult: [ast.Add],
    ast.FloorDiv: [ast.Mult],
    ast.Div: [ast.Mult],
    ast.Mod: [ast.FloorDiv],
    ast.BitAnd: [ast.BitOr],
    ast.BitOr: [ast.BitAnd],
}


@dataclass
class Mutant:
    module: str
    line: int
    before: str  # the statement, on one line
    after: str
    tree: ast.Module

    @property
    def statement(self) -> str:  # as in mutants.toml
        return f"{self.before} -> {self.after}"

    @property
    def key(self) -> str:
        return f"{self.module}: {self.statement}"

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.before}  ->  {self.after}"


def mutants(module: str) -> Iterator[Mutant]:
    """Every change of one place, in the order of the file."""
    tree = ast.parse((ENGINE / f"{module}.py").read_text("utf-8"))
    for place, (node, statement) in enumerate(places(tree)):
        for number in range(len(list(changes(copy.deepcopy(node))))):
            other = copy.deepcopy(tree)
            twin, around = list(places(other))[place]
            before = brief(statement)
            new = list(changes(twin))[number]()
            if isinstance(node, ast.stmt) and new is not None:
                Replace(twin, new).visit(other)
                around = new
            ast.fix_missing_locations(other)
            yield Mutant(module, node.lineno, before, brief(around), other)


def places(tree: ast.AST, statement: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.AST]]:
    """What can be changed, with the statement that it stands in: neither types nor texts."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list") or isinstance(tree, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or is_for_types(child):
                continue
            around = child if isinstance(child, ast.stmt) or statement is None else statement
            if hasattr(child, "lineno"):
                yield child, around
            yield from places(child, around)


def is_for_types(node: ast.AST) -> bool:
    aliases = ("Callable", "Literal")
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} if isinstance(node, ast.stmt) else set()
    return (isinstance(node, ast.If) and "TYPE_CHECKING" in names) or (
        isinstance(node, ast.Assign) and bool(names.intersection(aliases))
    )


def changes(node: ast.AST) -> Iterator:
    """Functions that each make one change: in the node, or, of a statement, what stands in its place."""

    def setter(name, value):
        return lambda: setattr(node, name, value)

    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for other in OTHERS[type(op)]:
                yield setter("ops", [*node.ops[:i], other(), *node.ops[i + 1 :]])
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp):
        for other in OTHERS.get(type(node.op), ()):
            yield setter("op", other())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield setter("op", ast.UAdd())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield setter("value", not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield setter("value", node.value + 1)
        yield setter("value", node.value - 1)
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not is_turned(node.test):
        yield setter("test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.comprehension):
        for i, test in enumerate(node.ifs):
            yield setter("ifs", [*node.ifs[:i], ast.UnaryOp(ast.Not(), test), *node.ifs[i + 1 :]])
    elif isinstance(node, ast.For):
        yield setter("iter", ast.Tuple([], ast.Load()))
    yield from removals(node)


def is_turned(test: ast.AST) -> bool:
    """Whether a change of its operator is its opposite already."""
    opposites = ast.Is | ast.IsNot | ast.In | ast.NotIn | ast.Eq | ast.NotEq
    return isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], opposites)


def removals(node: ast.AST) -> Iterator:
    """Of a statement: leave it out, or do the other thing."""
    if isinstance(node, ast.Break):
        yield ast.Continue
    elif isinstance(node, ast.Continue):
        yield ast.Break
    elif isinstance(node, ast.Return) and node.value is not None:
        yield lambda: ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.Delete | ast.Raise):
        yield ast.Pass
    elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
        yield ast.Pass


class Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


def brief(statement: ast.AST) -> str:
    return " ".join(ast.unparse(statement).split("\n", 1)[0].split())


class Wrong(SourceFileLoader):
    """Imports a mutant as if it were the module."""

    def __init__(self, name: str, path: str, code: CodeType):
        super().__init__(name, path)
        self.code = code

    def get_code(self, fullname: str) -> CodeType:
        return self.code


class Finder:
    def __init__(self, mutant: Mutant):
        self.name, self.path = f"mini_engine.{mutant.module}", str(ENGINE / f"{mutant.module}.py")
        self.code = compile(mutant.tree, self.path, "exec")

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        return spec_from_file_location(name, self.path, loader=Wrong(name, self.path, self.code))


def run(
    mutants: Sequence[Mutant | None], tests: list[str], jobs: int
) -> Iterator[tuple[Mutant | None, str, float]]:
    """What became of each, and the processor's seconds that took."""
    gc.freeze()  # else each fork's first collection copies all that is here, the mutants too
    left, going = list(reversed(mutants)), {}
    while left or going:
        while left and len(going) < jobs:
            mutant, start = left.pop(), time.monotonic()
            if (child := os.fork()) == 0:
                try:
                    os._exit(judge(mutant, tests))
                finally:
                    os._exit(70)
            going[child] = mutant, start
        time.sleep(0.01)
        for child, (mutant, start) in list(going.items()):
            if time.monotonic() - start > WALL:
                os.kill(child, signal.SIGKILL)
            pid, status, usage = os.wait4(child, os.WNOHANG)
            if pid:
                del going[child]
                code = "signal" if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                yield mutant, OUTCOMES.get(code, "broken"), usage.ru_utime + usage.ru_stime


class Hurry:
    """Ends the process in a test that runs in circles."""

    def pytest_runtest_setup(self) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + CPU, resource.RLIM_INFINITY))


def judge(mutant: Mutant | None, tests: list[str]) -> int:
    """In the fork: pytest, quiet, to the first failure."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    resource.setrlimit(resource.RLIMIT_DATA, (3 * 2**30, 3 * 2**30))
    Hurry().pytest_runtest_setup()
    if mutant is not None:
        sys.meta_path.insert(0, Finder(mutant))
    quiet = os.open(os.devnull if mutant else LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-x", "-p", "no:cacheprovider", f"--tb={'no' if mutant else 'short'}", "-k", LEFT_OUT]
    for some in (tests[:1], tests[1:]):  # the first file notices most, and the others need not be read
        if some and (code := pytest.main([*options, *(str(TESTS / name) for name in some)], [Hurry()])):
            return int(code)
    return 0


def preload() -> None:
    """Load what the engine loads, and forget the engine itself: each fork imports it anew."""
    import mini_engine.llm  # noqa: F401

    for name in [name for name in sys.modules if name.partition(".")[0] in ("mini_engine", "labs")]:
        del sys.modules[name]
    gc.collect()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=", ".join(COVER))
    parser.add_argument("--sample", type=int, default=0, help="so many of each module, drawn; 0: all")
    parser.add_argument("--alive", action="store_true", help="only those that lived when last tried")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="so many at a time")
    parser.add_argument("--list", action="store_true", help="print the mutants and run none")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    preload()
    ALIVE.parent.mkdir(exist_ok=True)
    ALIVE.touch()
    reasons = tomllib.loads((TESTS / "mutants.toml").read_text("utf-8"))
    ok = True
    for module in args.modules or COVER:
        drawn = here = sorted(mutants(module), key=lambda mutant: mutant.line)
        if args.alive:
            known = set(ALIVE.read_text("utf-8").splitlines())
            drawn = [mutant for mutant in here if mutant.key in known]
        if args.sample:
            drawn = random.Random(module).sample(drawn, min(args.sample, len(drawn)))
        if args.list:
            print(*drawn, sep="\n")
            continue
        living = try_out(module, drawn, args.jobs)
        ok &= report(living, reasons.get(module, {}))
        if drawn is here:
            for statement in set(reasons.get(module, ())) - {mutant.statement for mutant in living}:
                print(f"  in mutants.toml, but noticed: {statement}")
        ok &= args.alive or len(living) <= (1 - ENOUGH) * len(drawn)
    return 0 if ok else 1


def try_out(module: str, drawn: list[Mutant], jobs: int) -> list[Mutant]:
    """Run these mutants of a module, and print what became of them; those that live."""
    ((_, outcome, _),) = run([None], COVER[module], 1)
    if outcome != "alive":
        raise SystemExit(f"{module}: its tests do not pass without any mutant ({outcome}): {LOG}")
    counts = dict.fromkeys(("failed", "late", "broken", "alive"), 0)
    living = []
    for mutant, outcome, seconds in run(drawn, COVER[module], jobs):
        counts[outcome] += 1
        if outcome == "alive":
            living.append(mutant)
        if os.environ.get("VERBOSE"):
            print(f"{outcome:7} {seconds:5.1f} s  {mutant}", flush=True)
    killed = 1 - len(living) / max(1, len(drawn))
    print(f"{module}: {len(drawn)} mutants, {counts}: {killed:.1%} killed", flush=True)
    known = set(ALIVE.read_text("utf-8").splitlines()) - {mutant.key for mutant in drawn}
    ALIVE.write_text("".join(f"{key}\n" for key in known.union(m.key for m in living)), "utf-8")
    return living


def report(living: list[Mutant], reasons: dict[str, str]) -> bool:
    """Print why each may live; whether all may."""
    unknown = 0
    for mutant in living:
        reason = reasons.get(mutant.statement, "")
        unknown += not reason
        print(f"  alive, line {mutant.line}: {mutant.before}  ->  {mutant.after}")
        print(f"      {reason or 'NO TEST NOTICES'}", flush=True)
    return not unknown


if __name__ == "__main__":
    raise SystemExit(main())
