"""The student edition: the course without solutions, known mistakes and readable engine twins.

What a learner should not read by accident, but the labs stand on, is sealed (packed): the engine's twins,
the oracles that random scripts compare with, the reference. This is no lock, and the grader never trusts it.
"""

import base64
import json
import shutil
import tempfile
import textwrap
import zlib
from dataclasses import astuple
from fnmatch import fnmatch
from importlib import import_module
from operator import attrgetter
from pathlib import Path

from labs.kit.judge.manifest import LABS_DIR, Lab, LabError, find_lab, lab_ids
from labs.kit.judge.pristine import starter_source
from labs.kit.judge.task_status import known

ROOT = LABS_DIR.parent
OWN = Path(__file__).with_name("student")  # files that this edition has in place of the course's
LEFT_OUT = (
    ".git", ".venv", "__pycache__", ".state", "*.egg-info", ".*_cache", ".hypothesis", ".ipynb_checkpoints",
    "build", "dist", "out", ".ci", ".github", "*.pyc",
    "labs/lab-*/solution.py", "labs/lab-*/author/mistakes.toml", "labs/lab-*/starter.py",
    "labs/lab-*/starter.new.py",
    "docs/_build", "docs/_ext", "docs/_static", "docs/conf.py", "docs/index.md", "docs/api.md",
    "docs/hosting.md", "docs/reliability.md",
    "labs/kit/author", "labs/kit/browser", "labs/kit/grader", "labs/kit/pristine",
    "tests", "*instructor*", "docs/examples",
    "mini_engine/loading/shakespeare/train.py", "docs/images/*.py",
    "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "docs/architecture.md",
    "docs/images/architecture.png",
)  # fmt: skip

SEALED = '''"""{words}, sealed: it runs as ever, and would give away what the labs have you write."""

import base64
import zlib

_PACKED = """
{packed}
"""
exec(compile(zlib.decompress(base64.b64decode(_PACKED)), "<{name}, sealed>", "exec"))
'''


def export(target: Path) -> list[str]:
    """Write the student edition into `target`, or bring one there up to date; notes for the instructor.

    A starter.py that was edited is kept. Where the course has changed it too, the new one is laid
    beside it as starter.new.py.
    """
    pristine = target / "labs" / "kit" / "pristine"
    if target.exists() and any(target.iterdir()) and not pristine.exists():
        raise LabError(f"{target} is not empty, and not an exported course; name a new folder")
    try:
        if pristine.exists():
            return _write(target, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place, so that half an edition is never taken for one.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as folder:
            notes = _write(Path(folder, "edition"), Path(folder))
            if target.exists():
                target.rmdir()
            Path(folder, "edition").rename(target)
            return notes
    except shutil.Error as error:  # a list, of every file
        source, _, why = error.args[0][0]
        raise LabError(f"{target} cannot be written: {source}: {why}") from None


def _write(target: Path, passed_by: Path) -> list[str]:
    """The edition into a folder; `passed_by` is not copied, should it lie in the course."""
    pristine, sealed = target / "labs" / "kit" / "pristine", sealed_files()

    def left_out(folder: str, names: list[str]) -> list[str]:
        paths = [Path(folder, name) for name in names]
        return [path.name for path in paths if path.resolve() == passed_by.resolve() or _is_left_out(path)]

    shutil.copytree(ROOT, target, ignore=left_out, dirs_exist_ok=True)
    pristine.mkdir(parents=True, exist_ok=True)
    for path, (place, words) in sealed.items():
        (target / place).write_text(seal((ROOT / path).read_text(encoding="utf-8"), words), encoding="utf-8")
    for lab in map(find_lab, lab_ids()):
        (target / lab.file("fingerprints.json").relative_to(ROOT)).write_text(expanded(lab), encoding="utf-8")
    shutil.copytree(OWN, target, dirs_exist_ok=True)
    return [note for lab_id in lab_ids() if (note := _starter(lab_id, target, pristine))]


def expanded(lab: Lab) -> str:
    """fingerprints.json with title, hint and test in place of ids, as mistakes.toml is left out."""
    listed = {task: {key: astuple(name) for key, name in names.items()} for task, names in known(lab).items()}
    return json.dumps(listed, indent=1, ensure_ascii=False) + "\n"


def sealed_files() -> dict[str, tuple[str, str]]:
    """Of each file that is sealed, where it goes, and what it is called there."""
    found = {path: (path, f"the engine's {name}") for path, name in twins().items()}
    for lab_id in lab_ids():
        found[f"labs/{lab_id}/solution.py"] = (
            f"labs/kit/pristine/{lab_id}-reference.py",
            f"{lab_id}'s reference",
        )
        if find_lab(lab_id).file("oracle.py").exists():
            oracle = f"labs/{lab_id}/author/oracle.py"
            found[oracle] = (oracle, f"{lab_id}'s oracle")
    return found


def twins() -> dict[str, str]:
    """The files that hold a lab's twin, and their modules: where it is defined, not where it is named."""
    found = {}
    for task in (task for lab_id in lab_ids() for task in find_lab(lab_id).tasks):
        module, _, part = task.engine.partition(":")
        twin = attrgetter(part)(import_module(module))
        name = twin.fget.__module__ if isinstance(twin, property) else twin.__module__
        path = name.replace(".", "/")
        found[f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"] = name
    return found


def seal(source: str, words: str) -> str:
    """A module's source in a form that runs but is not read; `words` name it."""
    packed = base64.b64encode(zlib.compress(source.encode(), 9)).decode()
    lines = "\n".join(textwrap.wrap(packed, 100))
    return SEALED.format(words=words[0].upper() + words[1:], name=words, packed=lines)


def _starter(lab_id: str, target: Path, pristine: Path) -> str:
    """Write or merge one starter; a line to say when a person has to look."""
    new = starter_source(find_lab(lab_id))
    starter, kept = target / "labs" / lab_id / "starter.py", pristine / f"{lab_id}.py"
    old = kept.read_text(encoding="utf-8") if kept.exists() else None
    yours = starter.read_text(encoding="utf-8", errors="replace") if starter.exists() else None
    kept.write_text(new, encoding="utf-8")
    if yours is None or yours == old:
        starter.write_text(new, encoding="utf-8")
    elif new not in (old, yours):
        starter.with_name("starter.new.py").write_text(new, encoding="utf-8")
        return f"{lab_id}: the starter has changed; the edited one stays, starter.new.py lies beside it"
    return ""


def _is_left_out(path: Path) -> bool:
    texts = (path.name, path.relative_to(ROOT).as_posix())
    return any(fnmatch(text, pattern) for text in texts for pattern in LEFT_OUT)
