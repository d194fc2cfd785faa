"""The code for Windows, tested on any system."""

import ast
import os
import signal
import subprocess
import sys
from io import BytesIO, TextIOWrapper

import pytest
import torch

import mini_engine.commands
from labs import __main__ as labs_main
from labs.kit.judge import guard, matrix, plugin
from labs.kit.judge.guard import TimeUp, deadline
from labs.kit.judge.manifest import LABS_DIR, find_lab
from mini_engine.attention import KVPool
from mini_engine.model import ModelConfig

ROOT = LABS_DIR.parent
SOURCES = [path for package in ("labs", "mini_engine") for path in sorted((ROOT / package).rglob("*.py"))]
LINUX = {f"labs/kit/grader/{name}.py" for name in ("inside", "measure")}  # sandboxes are there alone
OWN = [p for p in SOURCES if "tests" not in p.parts and p.relative_to(ROOT).as_posix() not in LINUX]
POSIX_ONLY = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}


def test_commands_are_spelled_for_powershell_and_pytest_s_ids_with_slashes(monkeypatch):
    assert matrix.test_file(find_lab("lab-01")) == "labs/lab-01/test_lab.py"
    monkeypatch.setattr(plugin.os, "name", "nt")
    two = plugin.command("pytest labs", LAB_IMPL="starter", CI="true")
    assert two == "$env:LAB_IMPL='starter'; $env:CI='true'; pytest labs"


def test_without_signals_a_loop_ends_all_the_same(monkeypatch):
    monkeypatch.delattr(signal, "pthread_kill", raising=False)
    monkeypatch.delattr(signal, "SIGURG", raising=False)
    assert not guard._can_wake()
    with pytest.raises(TimeUp), deadline(0.05):
        while True:
            pass


def console(monkeypatch, encoding: str) -> BytesIO:
    """A legacy console as stdout and stderr; what it shows, as bytes."""
    shown = BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, TextIOWrapper(shown, encoding, write_through=True))
    return shown


@pytest.mark.parametrize("main", [mini_engine.commands.main, labs_main.main], ids=["mini-engine", "labs"])
def test_a_console_without_a_letter_shows_a_question_mark(monkeypatch, main):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "argv", ["main", "--help"])
    shown = console(monkeypatch, "cp437")
    with pytest.raises(SystemExit):
        main()
    print("\u2026 in Kyiv: \u041a\u0438\u0457\u0432")
    assert b"? in Kyiv: ????" in shown.getvalue() and b"usage" in shown.getvalue().lower()


def test_the_kv_pool_is_zeros_where_memory_has_no_flags(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    config = ModelConfig("llama", 50, 32, 48, 2, 4, 2, 8, 128)
    pool = KVPool(config, num_blocks=3, block_size=4, dtype=torch.float32, device="cpu")
    assert not pool.k.any() and not pool.v.any()
    pool.k[1, 2] = 7.0
    assert pool.k.sum() == 7.0 * pool.k[1, 2].numel()


def test_no_module_needs_what_windows_lacks():
    """No POSIX module at a module's top, and no fork, alarm or kill anywhere."""
    for path in OWN:
        tree = ast.parse(path.read_text("utf-8"))
        for node in tree.body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not POSIX_ONLY & set(names), f"{path} imports {names}"
        used = {f"{n.value.id}.{n.attr}" for n in ast.walk(tree) if _of_a_module(n)}
        assert not used & {"os.fork", "os.kill", "os.getuid", "signal.SIGALRM", "signal.alarm"}, path


def _of_a_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


def strict_about_encodings(code: str, **variables: str) -> None:
    """Run it where each file that labs or mini_engine open without naming its encoding is an error."""
    ours = "warnings.filterwarnings('error', category=EncodingWarning, module=r'(labs|mini_engine)\\b')"
    line = [sys.executable, "-X", "warn_default_encoding", "-c", f"import sys, warnings; {ours}\n{code}"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, encoding="utf-8", env=os.environ | variables)
    assert (done.returncode, "EncodingWarning" in done.stdout + done.stderr) == (0, False), done.stderr


def test_no_text_is_read_or_written_in_the_machine_s_own_encoding(tmp_path):
    """Windows takes cp1252 if none is named."""
    page = tmp_path / "page.html"
    line = ["mini-engine", "trace", "play", "--example", "--no-open", "--out", str(page)]
    strict_about_encodings(f"sys.argv = {line}\nfrom mini_engine.commands import main\nmain()")
    strict_about_encodings(
        "sys.argv = ['labs', 'solution', '1', '--spoil']\nfrom labs.__main__ import main\nmain()"
    )
    assert page.exists()
