"""Mutation testing of the engine's core: one small thing is made wrong, and a test must notice.

    python -m mini_engine.tests.mutants [MODULE ...] [--sample N]

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
import sys
import time
import tomllib
from collections.abc import Iterator
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
# By module the tests that cover it, those first that are quick and find most. What takes long, or starts
# processes, which would read the module's own file, is left out.
COVER = {
    "scheduler": ["test_scheduler.py", "test_invariants.py", "test_conformance.py"],
    "block_manager": ["test_block_manager.py", "test_invariants.py", "test_conformance.py"],
    "batch": ["test_batch.py", "test_paged_attention.py"],
    "attention": ["test_paged_attention.py", "test_batch.py"],
    "sampler": ["test_sampler.py"],
    "engine": ["test_engine.py", "test_llm.py", "test_conformance.py"],
}
LEFT_OUT = "not hash_seeds and not oracle and not smollm2"
ENOUGH = 0.95
WALL, CPU = 300, 60  # seconds a mutant may take: beyond them it runs in circles, and is noticed

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
    def key(self) -> str:
        return f"{self.module}: {self.before} -> {self.after}"


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


def run(mutant: Mutant | None, tests: list[str]) -> tuple[str, float]:
    """What became of it, and the seconds that took: alive, failed (a test), broken (it cannot even be
    imported), late (the time was up)."""
    start = time.monotonic()
    if (child := os.fork()) == 0:
        try:
            os._exit(judge(mutant, tests))
        finally:
            os._exit(70)
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        took = time.monotonic() - start
        if pid:
            break
        if took > WALL:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return "late", took
        time.sleep(0.02)
    if os.WIFSIGNALED(status):
        return "late", took
    return {0: "alive", 1: "failed", 5: "no tests"}.get(os.WEXITSTATUS(status), "broken"), took


def judge(mutant: Mutant | None, tests: list[str]) -> int:
    """In the fork: pytest, quiet, to the first failure."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU))
    resource.setrlimit(resource.RLIMIT_DATA, (3 * 2**30, 3 * 2**30))
    if mutant is not None:
        sys.meta_path.insert(0, Finder(mutant))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    options = ["-x", "-n0", "-p", "no:cacheprovider", "-k", LEFT_OUT]
    return int(pytest.main([*options, *(str(TESTS / name) for name in tests)]))


def preload() -> None:
    """Load what the engine loads, and forget the engine itself: each fork imports it anew."""
    import mini_engine.llm  # noqa: F401

    for name in [name for name in sys.modules if name.partition(".")[0] in ("mini_engine", "labs")]:
        del sys.modules[name]
    gc.collect()
    gc.freeze()  # else each fork's first collection copies all of it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=", ".join(COVER))
    parser.add_argument("--sample", type=int, default=0, help="so many of each module, drawn; 0: all")
    parser.add_argument("--list", action="store_true", help="print the mutants and run none")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    preload()
    reasons = tomllib.loads((TESTS / "mutants.toml").read_text("utf-8"))
    ok = True
    for module in args.modules or COVER:
        ok &= report(module, args.sample, args.list, reasons.get(module, {}))
    return 0 if ok else 1


def report(module: str, sample: int, listing: bool, reasons: dict[str, str]) -> bool:
    """Run a module's mutants and print what became of them; whether all that live may."""
    here = list(mutants(module))
    drawn = random.Random(module).sample(here, min(sample, len(here))) if sample else here
    if listing:
        print(*(f"{m.module}:{m.line}: {m.before}  ->  {m.after}" for m in here), sep="\n")
        return True
    if (outcome := run(None, COVER[module])[0]) != "alive":
        print(f"{module}: its tests do not pass without any mutant: {outcome}")
        return False
    counts = dict.fromkeys(("failed", "late", "broken", "alive"), 0)
    living = []
    for mutant in sorted(drawn, key=lambda m: m.line):
        outcome, took = run(mutant, COVER[module])
        counts[outcome] += 1
        if outcome == "alive":
            living.append(mutant)
        if os.environ.get("VERBOSE"):
            print(
                f"{outcome:7} {took:5.1f} s  {module}:{mutant.line}: {mutant.before}  ->  {mutant.after}",
                flush=True,
            )
    killed = 1 - counts["alive"] / len(drawn)
    print(f"{module}: {len(drawn)} of {len(here)} mutants, {counts}: {killed:.1%} killed", flush=True)
    unknown = 0
    for mutant in living:
        reason = reasons.get(mutant.key.partition(": ")[2], "")
        unknown += not reason
        print(f"  alive, line {mutant.line}: {mutant.before}  ->  {mutant.after}")
        print(f"      {reason or 'NO TEST NOTICES'}")
    return not unknown and killed >= ENOUGH


if __name__ == "__main__":
    raise SystemExit(main())
