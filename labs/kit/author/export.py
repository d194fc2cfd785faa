"""The student edition: the course without solutions, known mistakes and readable engine twins.

Files that the labs need, and that would give answers away, are sealed (packed): the engine's twins, the
oracles, the reference solutions. This is no lock, and the grader does not rely on it.
"""

import json
import re
import shutil
import tempfile
import textwrap
from dataclasses import astuple
from fnmatch import fnmatch
from importlib import import_module
from operator import attrgetter
from pathlib import Path

from labs.kit.judge.manifest import LABS_DIR, Lab, LabError, find_lab, lab_ids
from labs.kit.judge.pristine import packed, starter_source
from labs.kit.judge.task_status import known
from mini_engine.renamed import old_names

ROOT = LABS_DIR.parent
STUDENT_FILES = Path(__file__).with_name("student")  # files that this edition has in place of the course's
LIST = "labs/kit/pristine/files.txt"  # in an edition: the files that the course has written there
FIRST_EDITION = Path(__file__).with_name("first_edition.txt")  # that list, for an edition without one
LEFT_OUT = (
    ".git", ".venv", "__pycache__", ".state", "*.egg-info", ".*_cache", ".hypothesis", ".ipynb_checkpoints",
    "build", "dist", "out", ".ci", ".github", ".pre-commit-config.yaml", "*.pyc",
    "labs/lab-*/solution.py", "labs/lab-*/author/mistakes.toml", "labs/lab-*/starter.py",
    "labs/lab-*/starter.new.py",
    "docs/_build", "docs/_ext", "docs/_static", "docs/conf.py", "docs/index.md", "docs/api.md",
    "docs/serving.md", "docs/hosting.md", "docs/reliability.md",
    "labs/kit/author", "labs/kit/browser", "labs/kit/grader", "labs/kit/pristine",
    "tests", "*instructor*", "docs/examples",
    "mini_engine/loading/shakespeare/*.py", "docs/images/*.py",
    "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "docs/architecture.md",
    "docs/images/architecture.svg",
)  # fmt: skip

# Passages of the pages: runs that play in the book alone, and scripts that are left out.
LEFT_OUT_OF_PAGES = re.compile(
    r"^## Watch it\n.*?(?=^## )|\s\(`python docs/images/[^)]*\)|\sIn the\s+book each[^.]*\.", re.M | re.S
)

SEALED = '''"""{words}, sealed: it runs, but its source is hidden, as it would give answers away."""

from mini_engine.sealed import opened

_PACKED = """
{packed}
"""
exec(opened(_PACKED, "{name}"))
'''


def export(target: Path) -> list[str]:
    """Write the student edition into `target`, or bring one there up to date. Return the instructor's notes.

    An update removes the files that the course no longer has. It keeps a starter.py that was edited, and all
    files that the course did not write. Where the course has changed an edited starter too, the new one is
    written beside it as starter.new.py. Raise LabError if `target` holds anything but an edition.
    """
    pristine = target / "labs" / "kit" / "pristine"
    if target.exists() and any(target.iterdir()) and not pristine.exists():
        raise LabError(f"{target} is not empty, and not an exported course; name a new folder")
    try:
        if pristine.exists():
            return _update(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place, so that half an edition is never taken for one.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as folder:
            notes = _write(Path(folder, "edition"), skip=Path(folder))
            if target.exists():
                target.rmdir()
            Path(folder, "edition").rename(target)
            return notes
    except shutil.Error as error:  # a list, of every file
        source, _, why = error.args[0][0]
        raise LabError(f"{target} cannot be written: {source}: {why}") from None


def _update(target: Path) -> list[str]:
    """Write the edition over an earlier one, and remove what only the earlier one had."""
    listed = target / LIST
    before = (listed if listed.exists() else FIRST_EDITION).read_text(encoding="utf-8").splitlines()
    notes = _write(target, skip=target)
    gone = sorted({*before} - {*listed.read_text(encoding="utf-8").splitlines()})
    for path in (target / name for name in gone if ".." not in name.split("/")):
        if path.name != "starter.py":  # the learner's
            path.unlink(missing_ok=True)
        for folder in path.relative_to(target).parents[:-1]:
            left = {entry.name for entry in (target / folder).glob("*")}
            if left <= {"__pycache__"}:
                shutil.rmtree(target / folder, ignore_errors=True)
    return notes


def _write(target: Path, skip: Path) -> list[str]:
    """Write the edition into a folder; `skip` is not copied, should it lie in the course."""
    pristine, written = target / "labs" / "kit" / "pristine", set[Path]()

    def left_out(folder: str, names: list[str]) -> list[str]:
        paths = [Path(folder, name) for name in names]
        return [path.name for path in paths if path.resolve() == skip.resolve() or _is_left_out(path)]

    def copy(source: str, place: str) -> None:
        written.add(Path(place))
        shutil.copy2(source, place)
        if Path(source).is_relative_to(ROOT / "docs") and source.endswith(".md"):
            text = LEFT_OUT_OF_PAGES.sub("", Path(source).read_text("utf-8"))
            Path(place).write_text(text, encoding="utf-8")

    shutil.copytree(ROOT, target, ignore=left_out, dirs_exist_ok=True, copy_function=copy)
    pristine.mkdir(parents=True, exist_ok=True)
    for path, (place, words) in sealed_files().items():
        (target / place).write_text(seal((ROOT / path).read_text(encoding="utf-8"), words), encoding="utf-8")
        written.add(target / place)
    for lab in map(find_lab, lab_ids()):
        (target / lab.file("fingerprints.json").relative_to(ROOT)).write_text(expanded(lab), encoding="utf-8")
    shutil.copytree(STUDENT_FILES, target, dirs_exist_ok=True, copy_function=copy)
    notes = [note for lab_id in lab_ids() for note in _starter(lab_id, target, pristine)]
    written |= {pristine / f"{lab_id}.py" for lab_id in lab_ids()}
    names = sorted(path.relative_to(target).as_posix() for path in written)
    (target / LIST).write_text("\n".join(names) + "\n", encoding="utf-8")
    return notes


def expanded(lab: Lab) -> str:
    """Return fingerprints.json with title, hint and test in place of ids: mistakes.toml is left out."""
    listed = {task: {key: astuple(name) for key, name in names.items()} for task, names in known(lab).items()}
    return json.dumps(listed, indent=1, ensure_ascii=False) + "\n"


def sealed_files() -> dict[str, tuple[str, str]]:
    """Return, by file to seal, its place in the edition and its description."""
    found = {path: (path, f"the engine's {name}") for path, name in twins().items()}
    for lab_id in lab_ids():
        place = f"labs/kit/pristine/{lab_id}-reference.py"
        found[f"labs/{lab_id}/solution.py"] = place, f"{lab_id}'s reference"
        if find_lab(lab_id).file("oracle.py").exists():
            oracle = f"labs/{lab_id}/author/oracle.py"
            found[oracle] = (oracle, f"{lab_id}'s oracle")
    return found


def twins() -> dict[str, str]:
    """Return the files, with their modules, that define a task's twin in the engine."""
    found = {}
    for task in (task for lab_id in lab_ids() for task in find_lab(lab_id).tasks):
        module, _, part = task.engine.partition(":")
        twin = attrgetter(part)(import_module(module))
        name = twin.fget.__module__ if isinstance(twin, property) else twin.__module__
        path = name.replace(".", "/")
        found[f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"] = name
    return found


def seal(source: str, words: str) -> str:
    """Return a module's source in a form that runs but cannot be read; `words` describe it."""
    lines = "\n".join(textwrap.wrap(packed(source, words), 100))
    return SEALED.format(words=words[0].upper() + words[1:], name=words, packed=lines)


def _starter(lab_id: str, target: Path, pristine: Path) -> list[str]:
    """Write or keep one starter. Return notes for the instructor."""
    new = starter_source(find_lab(lab_id))
    starter, kept = target / "labs" / lab_id / "starter.py", pristine / f"{lab_id}.py"
    old = kept.read_text(encoding="utf-8") if kept.exists() else None
    edited = starter.read_text(encoding="utf-8", errors="replace") if starter.exists() else None
    kept.write_text(new, encoding="utf-8")
    if edited is None or edited == old:
        starter.write_text(new, encoding="utf-8")
        return []
    notes = [
        f"{lab_id}: {name} is now called {new}; the old name works for one more release"
        for name, new in old_names(edited).items()
    ]
    if new not in (old, edited):
        starter.with_name("starter.new.py").write_text(new, encoding="utf-8")
        kept_one = "the edited one is kept, starter.new.py is beside it"
        notes.insert(0, f"{lab_id}: the starter has changed; {kept_one}")
    return notes


def _is_left_out(path: Path) -> bool:
    texts = (path.name, path.relative_to(ROOT).as_posix())
    return any(fnmatch(text, pattern) for text in texts for pattern in LEFT_OUT)
