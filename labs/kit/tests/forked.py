"""`python -m LINE` forked from a process that has loaded pytest: half the time of one that begins anew.

That process has loaded what the labs' commands load, but not labs itself: that is the folder's own.
"""

import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from threading import Lock

from labs.kit.judge.manifest import LABS_DIR

ROOT = LABS_DIR.parent
SUBREAPER = 36  # of prctl: a descendant whose parent has ended becomes this process's child
ASKING = Lock()  # labs are tested two at a time


@cache
def control() -> tuple[socket.socket, subprocess.Popen]:
    """The process that forks, and its socket; it ends when this one does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own = {k: v for k, v in os.environ.items() if k != "LAB_IMPL"} | {"PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", __name__, str(theirs.fileno())]
    quiet = dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL)
    with theirs:
        env, passed = own | {"PYTHONUTF8": "1"}, [theirs.fileno()]
        return ours, subprocess.Popen(line, cwd=ROOT, env=env, pass_fds=passed, **quiet)


class Forked:
    """A process as subprocess.Popen has it, of a line `python -m ...`."""

    def __init__(self, line, *, cwd, env, stdin, stdout, stderr):
        self.args, self.returncode = line, None
        with open(os.devnull, "rb") as nothing:
            files = [nothing if stdin == subprocess.DEVNULL else stdin, stdout, stderr]
            found = json.dumps([line[line.index("-m") + 1 :], str(cwd), dict(env)]).encode()
            with ASKING:
                ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
                socket.send_fds(control()[0], [found], [file.fileno() for file in files])
                self.pid = int(control()[0].recv(20))
                ctypes.CDLL(None).prctl(SUBREAPER, 0, 0, 0, 0)  # orphans of other tests are not ours

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()

    def poll(self, options=os.WNOHANG):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout=None):
        if timeout is not None and self.returncode is None:
            if not select.select([ended := os.pidfd_open(self.pid)], [], [], timeout)[0]:
                self.kill()
                raise subprocess.TimeoutExpired(self.args, timeout)
            os.close(ended)
        return self.poll(0)

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def run(line, *, cwd, env, input="", timeout=None) -> subprocess.CompletedProcess:
    """subprocess.run of a line `python -m ...`, which may read `input`; what it says is kept as text."""
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        asked.write(input.encode())
        asked.seek(0)
        with Popen(line, cwd=cwd, env=env, stdin=asked, stdout=out, stderr=err) as process:
            process.wait(timeout)
        for file in (out, err):
            file.seek(0)
        said = [file.read().decode().replace("\r\n", "\n") for file in (out, err)]
    return subprocess.CompletedProcess(line, process.returncode, *said)


Popen = Forked if sys.platform == "linux" else subprocess.Popen


def forking() -> tuple[str, list[str], str]:
    """Fork for each line that comes; in the new process, return its module, arguments and folder."""
    with socket.socket(fileno=int(sys.argv[1])) as line:
        while True:
            found, files, *_ = socket.recv_fds(line, 1 << 20, 3)
            if not found:
                os._exit(0)
            read, write = os.pipe()
            if not (between := os.fork()):
                if os.fork():
                    os._exit(0)  # its child is now the subreaper's
                os.write(write, str(os.getpid()).encode())
                break
            os.waitpid(between, 0)
            line.send(os.read(read, 20))
            for file in (read, write, *files):
                os.close(file)
    for place, file in enumerate(files):
        os.dup2(file, place)
    for file in (read, write, *files):
        os.close(file)
    (module, *arguments), folder, environment = json.loads(found)
    os.environ.clear()
    os.environ.update(environment)
    return module, arguments, folder


if __name__ == "__main__":
    import labs.__main__
    import labs.kit.judge.examine  # noqa: F401  # for the libraries that they load

    for name in [name for name in sys.modules if name.partition(".")[0] == "labs"]:
        del sys.modules[name]
    module, sys.argv[1:], folder = forking()
    os.chdir(folder)
    sys.path[0] = folder
    runpy.run_module(module, run_name="__main__", alter_sys=True)
