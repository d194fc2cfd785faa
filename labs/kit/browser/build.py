"""Builds the labs' web pages: `python -m labs.kit.browser.build OUT` writes a folder for any file server.

It contains Python, editor, player and the student edition of the course; a page loads from no other host.
"""

import gzip
import hashlib
import json
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from html import escape
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from labs.kit.arena import board
from labs.kit.arena.page import tables
from labs.kit.author.export import ROOT, export
from labs.kit.browser.csp import LAB, LABS, TEXT
from labs.kit.browser.demo import PARTS
from labs.kit.browser.readme import html_of
from labs.kit.judge.manifest import Lab, find_lab
from labs.kit.judge.pristine import starter_source
from labs.kit.toys.driver import DEFAULTS
from mini_engine.loading.registry import resolve
from mini_engine.loading.tokenizer import load_tokenizer
from mini_engine.show.player import write_shell
from mini_engine.trace import read_trace

HERE = Path(__file__).parent
PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
COURSE = (
    "conftest.py", "pyproject.toml",
    "labs/kit/arena/*.py", "labs/kit/arena/*.json", "labs/kit/arena/policies/*.py",
    "labs/*.py", "labs/kit/*.py", "labs/kit/toys/*.py", "labs/kit/judge/*.py",
    "labs/kit/judge/sentences/*.*",
    "mini_engine/*.py", "mini_engine/trace/*.py", "mini_engine/sim/*.py", "mini_engine/structured/*.py",
    "mini_engine/speculative/*.py",
    "mini_engine/show/__init__.py", "mini_engine/show/player/*",
)  # fmt: skip
# pytest colours its output; of Pygments' five hundred languages it needs only these.
PYGMENTS = re.compile(
    r"pygments/(lexers|formatters|styles)/(?!__init__|_mapping|python|terminal\.|default|diff)"
)
CONCEPTS = {
    "lab-01": "02-batching", "lab-02": "06-chunked-prefill", "lab-03": "08-preemption",
    "lab-06": "10-prefix-caching", "lab-08": "13-sampling", "lab-09": "14-structured-output",
    "lab-11": "16-serving",
}  # fmt: skip
WRITTEN = 60  # letters of each of the six chats
SETTINGS = {  # in which they do not all fit
    "max_num_batched_tokens": 24, "max_num_seqs": 5, "num_blocks": 20, "block_size": 16,
    "long_prefill_token_threshold": 16, "prefix_caching": True,
}  # fmt: skip
MOST = 12_000_000  # bytes, gzipped, that the first visit of a lab's page may load


def build(out: Path, book: str = "") -> None:
    """Write the pages into `out`, replacing earlier ones; `book` is the path from it to the book."""
    if out.exists() and any(out.iterdir()) and not (out / "app" / "course.zip").exists():
        raise ValueError(f"{out} is not empty, and not such a site; name a new folder")
    shutil.rmtree(out, ignore_errors=True)
    modules, app = npm(), out / "app"
    (app / "pyodide").mkdir(parents=True)
    for name in PYODIDE:
        shutil.copy(modules / "pyodide" / name, app / "pyodide" / name)
    lock = json.loads((modules / "pyodide" / "pyodide-lock.json").read_text("utf-8"))
    (app / "pyodide" / "pyodide-lock.json").write_text(json.dumps(lock | {"packages": {}}), encoding="utf-8")
    for path in (*(HERE / "page").glob("*.js"), HERE / "page" / "page.css"):
        shutil.copy(path, app)
    bundle(modules, app / "editor.js")
    write_shell(app / "player")
    with tempfile.TemporaryDirectory(prefix="labs-") as folder:
        course = Path(folder, "course")
        export(course)
        pack(course, app / "course.zip")
        labs = [find_lab(lab_id) for lab_id in LABS]
        for lab in labs:
            write_lab(lab, labs, course, out, book)
        write_arena(out, book)
    rows = "".join(
        f'<li><a href="{lab.id}/" {marks(lab)}><b>{lab.id} {escape(lab.title)}</b> {escape(lab.question)} '
        f"<small>about {lab.minutes} minutes</small></a></li>"
        for lab in labs
    )
    rows += (
        '<li><a href="arena/"><b>The arena</b> Which way to schedule serves most requests in time? '
        "<small>your policy against others, on eight workloads</small></a></li>"
    )
    back = f'<p><a href="{book}/docs/index.html">The book of this course</a></p>' if book else ""
    parts = {"POLICY": TEXT, "LABS": rows, "BOOK": back}
    (out / "index.html").write_text(filled("home.html", parts), encoding="utf-8")


def filled(name: str, parts: dict[str, str]) -> str:
    """Return a page of page/ with its parts filled in."""
    page = (HERE / "page" / name).read_text("utf-8")
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match[1]], page)


def npm() -> Path:
    """Return the folder of the pinned npm packages, installed once for each state of the lock file."""
    lock = (HERE / "package-lock.json").read_bytes()
    kept = ROOT / "out" / f"npm-{hashlib.sha256(lock).hexdigest()[:12]}"
    if kept.exists():
        return kept / "node_modules"
    kept.parent.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="npm-", dir=kept.parent))  # two processes may do this at once
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, folder / name)
    options = ("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
    try:
        subprocess.run(["npm", "ci", *options], cwd=folder, check=True, capture_output=True, text=True)
        folder.rename(kept)
    except FileNotFoundError:
        raise ValueError("npm is not installed; Pyodide and the editor come with it") from None
    except subprocess.CalledProcessError as error:
        raise ValueError(f"npm ci could not install what the pages need: {error.stderr[-500:]}") from None
    except OSError:  # the other process was first
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return kept / "node_modules"


def bundle(modules: Path, target: Path) -> None:
    """Write the editor and all its imports as one module."""
    source = HERE / "page" / "editor.js"
    options = ("--bundle", "--minify", "--format=esm", "--sourcefile=editor.js", "--legal-comments=none")
    line = [str(modules / ".bin" / "esbuild"), *options, f"--outfile={target.absolute()}"]
    done = subprocess.run(line, cwd=modules.parent, input=source.read_bytes(), capture_output=True)
    if done.returncode:
        raise ValueError(f"esbuild could not bundle the editor: {done.stderr.decode()[-1000:]}")


def pack(course: Path, target: Path) -> None:
    """Write the part of the student edition that judges these labs, and pytest, as one archive."""
    files = {path.relative_to(course).as_posix(): path for pattern in COURSE for path in course.glob(pattern)}
    for lab_id in LABS:
        for path in [
            *(course / "labs" / lab_id).glob("*.*"),
            *(course / "labs" / lab_id / "author").glob("*.*"),
            *(course / "labs/kit/pristine").glob(f"{lab_id}*.py"),
        ]:
            if path.suffix in (".py", ".toml", ".json"):
                files[path.relative_to(course).as_posix()] = path
    for name in ("__init__.py", "compiled.py", "race.py", "run.py", "demo.py"):
        files[f"labs/kit/browser/{name}"] = HERE / name
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        recorded = ("labs/kit/browser/answers.json", json.dumps(answers()).encode())
        ours = ((name, path.read_bytes()) for name, path in files.items())
        for name, data in [*packages(), recorded, *ours]:
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)


def answers() -> dict[str, Any]:
    """Return six chats and the letters that the engine wrote, as docs/images/hero.py recorded them."""
    hero = runpy.run_path(str(ROOT / "docs/images/hero.py"))
    tokenizer, tokens = load_tokenizer(resolve("shakespeare")), defaultdict[str, list[int]](list)
    for record in read_trace(hero["RECORDING"]).steps:
        for name, new in record.new_tokens.items():
            tokens[name] += new[: WRITTEN - len(tokens[name])]
    requests, texts = [], {}
    for name, (prompt, _, _, at) in zip(tokens, hero["CHATS"], strict=True):
        asked = tokenizer.encode(prompt)
        requests.append({"id": name, "prompt": asked, "max_tokens": len(tokens[name]), "at": at})
        texts[name] = [prompt, [tokenizer.decode([token]) for token in tokens[name]]]
    scenario = {"name": "six chats", "config": {**DEFAULTS, **SETTINGS}, "requests": requests}
    return {"scenario": scenario, "texts": texts, "tokens": tokens}


def packages() -> Iterator[tuple[str, bytes]]:
    """Yield the files of pytest and its dependencies, as installed here."""
    for package in PACKAGES:
        for file in distribution(package).files or ():
            name, path = file.as_posix(), Path(str(file.locate()))
            metadata = name.endswith((".dist-info/METADATA", ".dist-info/entry_points.txt"))
            if (name.endswith(".py") and not PYGMENTS.match(name) or metadata) and ".." not in name:
                yield f"site/{name}", path.read_bytes()


def write_lab(lab: Lab, labs: list[Lab], course: Path, out: Path, book: str) -> None:
    """Write one lab's page, its pictures, and the course's files that its texts link."""
    folder = out / lab.id
    shutil.copytree(lab.path / "images", folder / "images", ignore=shutil.ignore_patterns("*.py"))
    named: set[str] = {f"labs/{lab.id}/test_lab.py"}
    up = f"../{book}" if book else ""
    texts = {name: html_of(lab, name, course, named, up) for name in ("README.md", "AFTER.md")}
    for name in named:
        target = out / "source" / f"{name}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(course / name, target)
    current = {lab.id: " aria-current=page"}
    links = (f'<a href="../{one.id}/" {marks(one)}{current.get(one.id, "")}>{one.id}</a>' for one in labs)
    concept = f"{up}/docs/concepts/{CONCEPTS[lab.id]}.html"
    back = f'<a href="{up}/docs/index.html">The book</a><a href="{concept}">The idea behind it</a>'
    parts = {
        "POLICY": LAB,
        "BOOK": back if book else "",
        "ID": lab.id,
        "TITLE": escape(lab.title),
        "QUESTION": escape(lab.question),
        "OTHERS": "".join(links),
        "DEMO": demonstration(lab),
        "README": texts["README.md"],
        "AFTER": texts["AFTER.md"],
    }
    (folder / "index.html").write_text(filled("lab.html", parts), encoding="utf-8")
    data = {
        "id": lab.id,
        "starter": starter_source(lab),
        "tasks": [{"name": task.name, "hints": list(task.hints)} for task in lab.without_torch.tasks],
    }
    (folder / "lab.json").write_text(json.dumps(data), encoding="utf-8")


def demonstration(lab: Lab) -> str:
    """Return the learner's part at work, as a button, or as the command that shows it where a page cannot."""
    if lab.id in PARTS:
        return '<button id="own">Watch the engine write with your code</button>'
    left = [f"<code>{task.name}</code>" for task in lab.tasks if task not in lab.without_torch.tasks]
    rest = f"write {' and '.join(left)}, which need tensors; then " if left else ""
    command = f"<code>python -m labs demo {lab.id}</code> runs the engine with it"
    return f"<span>On your laptop, {rest}{command}.</span>"


def marks(lab: Lab) -> str:
    """Return what board.js reads of a lab from a link to it."""
    num_tasks = len(lab.without_torch.tasks)
    return f'data-lab-id="{lab.id}" data-title="{escape(lab.title)}" data-tasks="{num_tasks}"'


def write_arena(out: Path, book: str) -> None:
    """Write the arena's page, and what it shows before Python is loaded."""
    folder = out / "arena"
    folder.mkdir()
    data = {"policies": board.shipped(), **tables([*board.known()])}
    (folder / "arena.json").write_text(json.dumps(data), encoding="utf-8")
    back = f'<a href="../{book}/docs/arena.html">The book</a>' if book else ""
    parts = {"POLICY": LAB, "BOOK": back, "MEANING": escape(board.MEANING)}
    (folder / "index.html").write_text(filled("arena.html", parts), encoding="utf-8")


def first_load(out: Path, lab_id: str) -> dict[str, int]:
    """Return the files that the first visit of a lab's page loads, with their gzipped bytes."""
    page = [*(out / lab_id).rglob("*"), *(out / "app").rglob("*")]
    return {path.relative_to(out).as_posix(): zipped(path) for path in page if path.is_file()}


@cache
def zipped(path: Path) -> int:
    """Return the bytes of a file, gzipped as servers do."""
    return min(path.stat().st_size, len(gzip.compress(path.read_bytes(), 6)))


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("python -m labs.kit.browser.build OUT: the folder to build the site in")
    out = Path(sys.argv[1])
    try:
        build(out)
    except ValueError as error:
        sys.exit(f"error: {error}")
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {total / 1e6:.1f} MB in all")
    for lab_id in (*LABS, "arena"):
        loaded = sum(first_load(out, lab_id).values())
        limit = f"(gzipped; the limit is {MOST / 1e6:g})"
        print(f"{lab_id}/index.html loads {loaded / 1e6:.1f} MB at first {limit}")
        if loaded > MOST:
            sys.exit(f"error: {lab_id}'s page loads too much at first")
    print(f"serve it with: python -m http.server --directory {out}")


if __name__ == "__main__":
    main()
