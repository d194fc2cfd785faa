"""Makes starter.py from solution.py: the bodies of the tasks are removed, all else stays.

Docstrings and given functions are kept; imports that only the tasks needed are removed.
"""

import ast
import base64
import hashlib
import re
import textwrap
import zlib

from labs.kit.judge.manifest import LABS_DIR, Lab, LabError, functions, parsed, replace_body

NOT_WRITTEN = re.compile(r"(lab-\d+): ([\w.]+) is not written yet")
DOCSTRING = '''"""{id}, {title}: your file.

Replace each NotImplementedError by code; the docstrings say what to do, README.md says why.
Check with: LAB_IMPL=starter pytest labs/{id}     Stuck? python -m labs hint {id}
"""
'''


def starter_source(lab: Lab) -> str:
    """Return the pristine starter of a lab, generated from solution.py."""
    source = lab.file("solution.py").read_text(encoding="utf-8")
    for task in lab.tasks:
        names = [name for name in functions(source) if f"{name}.".startswith(f"{task.name}.")]
        if not names:
            raise LabError(f"solution.py has no {task.name!r}, which lab.toml calls a task")
        for name in names:  # the function, or all methods of the class
            message = f"{lab.id}: {name} is not written yet"
            source = replace_body(source, name, f'raise NotImplementedError("{message}")')
    module = parsed(source)
    if ast.get_docstring(module) is None:
        raise LabError(f"{lab.id}: solution.py needs a docstring at its top; the starter replaces it")
    lines = source.splitlines(keepends=True)
    body = "".join(lines[module.body[0].end_lineno :])
    return _without_unused_imports(DOCSTRING.format(id=lab.id, title=lab.title) + body)


def pristine_source(lab: Lab) -> str:
    """Return the pristine starter; the student edition, which has no solution, has it as a file."""
    kept = LABS_DIR / "kit" / "pristine" / f"{lab.id}.py"
    return kept.read_text(encoding="utf-8") if kept.exists() else starter_source(lab)


def with_given(lab: Lab, source: str) -> str:
    """Return a learner's file with the methods that are given now, and that an earlier edition left to write.

    A method is left as it is if it reads attributes that the file's own `__init__` does not make. What takes
    more than a line stands behind the file, so that its lines keep their numbers.
    """
    left = {name for _, name in NOT_WRITTEN.findall(source)} - {task.name for task in lab.tasks}
    try:
        yours, given = functions(source), functions(pristine_source(lab)) if left else {}
        longer = []
        for name in sorted(left & yours.keys() & given.keys()):
            made = yours.get(f"{name.partition('.')[0]}.__init__", given[name])
            known, read = (
                {node.attr for node in ast.walk(one) if isinstance(node, ast.Attribute) and is_own(node)}
                for one in (made, given[name])
            )
            if read <= known or NOT_WRITTEN.search(ast.unparse(made)):
                body = "\n".join(map(ast.unparse, given[name].body[1:]))
                if "\n" in body:
                    longer.append(name)
                else:
                    source = replace_body(source, name, body)
        if longer:
            source = "\n".join([source, *imports_for(lab, source), "", "", "class _Given:"])
            source += "".join(f"\n{textwrap.indent(ast.unparse(given[name]), '    ')}\n" for name in longer)
            source += "".join(f"\n{name} = _Given.{name.rpartition('.')[2]}" for name in longer) + "\n"
    except SyntaxError:  # which is reported when the file is loaded
        pass
    return source


def imports_for(lab: Lab, source: str) -> list[str]:
    """Return the pristine file's imports of names that the source does not have."""
    known = {*functions(source)}
    known |= {
        alias.asname or alias.name for node in parsed(source).body for alias in getattr(node, "names", ())
    }
    found = []
    for node in parsed(pristine_source(lab)).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [alias for alias in node.names if (alias.asname or alias.name) not in known]
            found += [ast.unparse(node)] if node.names else []
    return found


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def packed(source: str, name: str) -> str:
    """Return a module's source as the student edition has it; its mini_engine.sealed opens it again."""
    data = zlib.compress(source.encode(), 9)
    pad = hashlib.shake_256(name.encode()).digest(len(data))
    return base64.b64encode(bytes(map(int.__xor__, data, pad))).decode()


def interface(source: str) -> dict[str, str]:
    """Return every public function and method with its signature, to compare two files."""
    return {
        name: f"({ast.unparse(node.args)})"
        for name, node in functions(source).items()
        if not name.split(".")[-1].startswith("_") or name.endswith("__init__")
    }


def _without_unused_imports(source: str) -> str:
    tree = parsed(source)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    lines = source.splitlines(keepends=True)
    for node in reversed(tree.body):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        kept = [a for a in node.names if (a.asname or a.name.split(".")[0]) in used]
        if len(kept) == len(node.names):
            continue
        new, end = [], node.end_lineno or node.lineno
        if kept:
            node.names = kept
            new = [ast.unparse(node) + "\n"]
        elif end < len(lines) and not lines[end].strip() and not lines[node.lineno - 2].strip():
            end += 1  # the last import of its paragraph takes the blank line along
        lines[node.lineno - 1 : end] = new
    return "".join(lines)
