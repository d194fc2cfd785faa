"""The code in a file that was handed in: decoded as Python decodes it, or taken from a notebook's cells."""

import ast
import json
import re
from encodings import normalize_encoding
from encodings.aliases import aliases
from io import BytesIO
from tokenize import detect_encoding

from labs.kit.grader.contents import Refused
from labs.kit.grader.names import shown
from labs.kit.judge.manifest import Lab

STANDARD = {"utf_8_sig", *aliases.values()}  # no codec that a package adds, and none as slow as punycode
MAGIC = re.compile(r"^[%!].*$", re.MULTILINE)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def text_of(name: str, data: bytes) -> str:
    """Return a file's text; a coding cookie counts. Raise Refused if it is empty or not text."""
    encoding = "utf-8-sig"
    try:
        if not name.lower().endswith(".ipynb"):
            encoding = detect_encoding(BytesIO(data).readline)[0]
    except SyntaxError as error:
        if not str(error).startswith("invalid"):  # else bytes that are not UTF-8, without a cookie
            raise Refused(f"{shown(name)} names an encoding that is not read: {error}") from None
    try:
        standard = normalize_encoding(encoding).lower()
        if aliases.get(standard, standard) not in STANDARD:
            raise LookupError
        text = data.decode(encoding)
        text.encode()
    except UnicodeError as error:
        at = f" (at byte {error.start:,})" if isinstance(error, UnicodeDecodeError) else ""
        called = "UTF-8" if encoding.startswith("utf-8") else encoding
        raise Refused(f"{shown(name)} is not {called} text{at}") from None
    except LookupError:
        raise Refused(f"{shown(name)} names an encoding that is not read: {encoding}") from None
    if not text.strip():
        raise Refused(f"{shown(name)} is empty")
    return text


def cells(lab: Lab, name: str, notebook: str) -> str:
    """Return a notebook's code: the cells that define a task's function or class, and pure definitions.

    Raise Refused if it is no notebook, or no cell defines a task. Lines of IPython's own are left out.
    """
    try:
        every = json.loads(notebook)["cells"]
        found = ["".join(cell["source"]) for cell in every if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Refused(f"{shown(name)} is not a notebook") from None
    tasks = "|".join(sorted({task.name.partition(".")[0] for task in lab.tasks}))
    task = re.compile(rf"^(?:async\s+def|def|class)\s+(?:{tasks})\b", re.MULTILINE)
    code = [MAGIC.sub("", cell) for cell in found]
    if not any(map(task.search, code)):
        raise Refused(f"{shown(name)} has no cell with one of the tasks: {tasks.replace('|', ', ')}")
    return "\n\n".join(cell for cell in code if task.search(cell) or defines_alone(cell)) + "\n"


def defines_alone(cell: str) -> bool:
    """Whether a cell consists of functions and classes, such as helpers of a task."""
    try:
        return all(isinstance(node, DEFINITIONS) for node in ast.parse(cell).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
