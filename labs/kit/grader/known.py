"""Recognises files that are the course's own work: the reference or the engine's part, readable or packed.

A file that is disguised well is not found here; --similarity shows a person what is alike.
"""

import ast
import base64
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from labs.kit.judge.manifest import LABS_DIR, Lab, LabError, find_lab, functions
from labs.kit.judge.pristine import packed

PROOF = 150  # nodes of a syntax tree; in a lab of fewer, honest work may be the reference but for its names
TEXTS, SHORT, LONG = 50, 100, 1 << 20  # constants looked into, letters of one, bytes that it unpacks to
WRITTEN_ANYHOW = ("annotation", "returns", "type_comment", "type_params", "ctx", "decorator_list")


def refusal(lab: Lab, text: str) -> str:
    """Return why a submission's file is not graded as its own work, or ""."""
    ours = known_texts(lab.id)
    if name := ours.get(digest(text)):
        return f"it is the course's own file, {name}"
    try:
        tree = ast.parse(text)
        for constant in constants(tree):
            for unpacked in (constant, inflated(constant)):
                if name := ours.get(digest(unpacked)):
                    return f"it contains the course's own file, packed: {name}"
        return renamed(lab, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError, LabError):
        return ""  # such a file does not load, or departs


@cache
def known_texts(lab_id: str) -> dict[str, str]:
    """Return the names of the course's files that answer a lab, by the digest of each of their forms."""
    lab = find_lab(lab_id)
    answers = [lab.file("solution.py"), lab.file("oracle.py"), *{path for path, _ in twins(lab)}]
    found: dict[str, str] = {}
    for path in filter(Path.exists, answers):
        text, name = path.read_text("utf-8"), path.relative_to(LABS_DIR.parent).as_posix()
        found |= {digest(form): name for form in (text, packed(text, sealed_name(lab, path)))}
    return found


def sealed_name(lab: Lab, path: Path) -> str:
    """Return what the student edition calls a file that it seals."""
    if path.is_relative_to(lab.path):
        return f"{lab.id}'s {'reference' if path.name == 'solution.py' else 'oracle'}"
    module = path.relative_to(LABS_DIR.parent).with_suffix("").as_posix().replace("/", ".")
    return f"the engine's {module.removesuffix('.__init__')}"


def twins(lab: Lab) -> list[tuple[Path, str]]:
    """Return the engine's file and the name in it for each task."""
    parts = (task.engine.partition(":") for task in lab.tasks)
    return [(LABS_DIR.parent / f"{module.replace('.', '/')}.py", name) for module, _, name in parts]


def digest(text: str) -> str:
    """Return a digest of a text; spaces and ends of lines do not count."""
    return hashlib.blake2b("".join(text.split()).encode("utf-8", "replace"), digest_size=16).hexdigest()


def constants(tree: ast.AST) -> Iterator[str]:
    """Yield the first long texts of a file; a module that is sealed is one."""
    found = 0
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str | bytes) and len(value) >= SHORT and found < TEXTS:
            found += 1
            yield value if isinstance(value, str) else value.decode("latin-1")


def inflated(constant: str) -> str:
    """Return what base64 and zlib make of a constant, as earlier student editions packed files, or ""."""
    try:
        data = zlib.decompressobj().decompress(base64.b64decode("".join(constant.split())), LONG)
        return data.decode("utf-8", "replace")
    except (ValueError, zlib.error):
        return ""


def renamed(lab: Lab, text: str) -> str:
    """Return which of the course's files this is but for its names, comments and annotations, or ""."""
    tasks = [task.name for task in lab.tasks]
    yours = shapes(text, tasks)
    if sum(map(len, yours)) < PROOF:
        return ""
    for name, theirs in known_shapes(lab.id):
        if all(one in (other, NOTHING) for one, other in zip(yours, theirs, strict=True)):
            return f"it is the course's own file but for its names, {name}"
    return ""


@cache
def known_shapes(lab_id: str) -> list[tuple[str, list[tuple[str, ...]]]]:
    lab = find_lab(lab_id)
    tasks = [task.name for task in lab.tasks]
    engine = [one for path, name in twins(lab) for one in shapes(path.read_text("utf-8"), [name])]
    return [
        (f"labs/{lab.id}/solution.py", shapes(lab.file("solution.py").read_text("utf-8"), tasks)),
        ("the engine's parts", engine),
    ]


NOTHING: tuple[str, ...] = ()


def shapes(text: str, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return for each function or class the nodes of its bodies, with numbers for its own variables."""
    every, found = functions(text), []
    for name in names:
        parts = [node for key, node in every.items() if f"{key}.".startswith(f"{name}.")]
        own = {node.arg for part in parts for node in ast.walk(part) if isinstance(node, ast.arg)}
        nodes = (node for part in parts for node in ast.walk(part) if isinstance(node, ast.Name))
        own |= {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
        order: dict[str, int] = {}
        found.append(tuple(word for part in parts for word in flat(part.body, own, order)))
    return found


def flat(value: object, own: set[str], order: dict[str, int]) -> Iterator[str]:
    """Yield the nodes of a syntax tree; of `own` names only their order."""
    if isinstance(value, list):
        yield "["
        for one in value:
            is_remark = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)  # as a docstring is
            if not (isinstance(one, ast.Pass) or is_remark):
                yield from flat(one, own, order)
    elif isinstance(value, ast.AST):
        yield type(value).__name__
        for key, part in ast.iter_fields(value):
            if isinstance(part, str) and part in own and isinstance(value, ast.Name | ast.arg):
                yield str(order.setdefault(part, len(order)))
            elif key not in WRITTEN_ANYHOW:
                yield from flat(part, own, order)
    else:
        yield repr(value)
