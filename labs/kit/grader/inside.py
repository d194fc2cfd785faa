"""The server inside a sandbox: it has imported the libraries, and forks for every batch.

The server never runs a submission. Its child takes new namespaces, an empty /scratch and hard limits, plays
the batch's scripts on the submission, and answers through a pipe of its own. The server passes on one
answer, and how the child ended. The descriptors to the grader are its two arguments.
"""

import ctypes
import gc
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, NoReturn

from labs.kit.grader import frames, seccomp

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x4000, 0x40000
MS_REMOUNT_BIND = 0x1020
ANSWERS = ("llguidance", "transformers", "vllm", "sglang", "xgrammar", "outlines_core")  # packages
SCRATCH = "/scratch"  # the only place to write to; not /tmp, which may contain the interpreter
WAIT, CLOCK = 4, 30  # times its seconds that a batch may wait without computing, and take in all
ALL = (4, WAIT, CLOCK)  # times these that a lab may compute, wait, and take; each lab more adds one to each
TOGETHER = "no answer within the time that all batches have together"
PROCESSES, RESIDENT = 40, 3 << 30  # of the whole sandbox: limits of a process do not bind the superuser
NO_NEW_PRIVS, SET_DUMPABLE, CAPBSET_DROP = 38, 4, 24
NOBODY = 65534
LATER = """encodings.ascii encodings.latin_1 encodings.utf_16 numpy.fft numpy.linalg numpy.random
    unicodedata""".split()  # what Python and numpy import when it is needed


def main() -> None:
    requests, replies = map(int, sys.argv[1:3])
    ready = frames.receive(requests, 1 << 20, 60)
    for name in ready["imports"]:
        __import__(name)
    from labs.kit.grader import player
    from labs.kit.judge import loading

    player.find_lab(ready["lab"])
    loading.load(ready["lab"], "random_scripts")
    for name in (*ready["later"], *LATER):  # a batch finds no file of the course
        with suppress(ImportError):
            __import__(name)
    if sys.argv[4:] == ["nobody"]:
        become_nobody()
    gc.collect()
    gc.freeze()  # or the first collection in each fork would copy all pages
    frames.send(replies, {"ready": True, "torch": "torch" in sys.modules})
    while True:
        try:
            request = frames.receive(requests, 1 << 16, 1e9)
            batch = frames.receive_bytes(requests, 1 << 28, 60)
        except frames.BadFrame:  # the grader has ended
            return
        said, ended, took = answer(request, batch)
        frames.send(replies, {"id": request["id"], "ended": ended, "took": took})
        frames.send_bytes(replies, said)


def become_nobody() -> None:
    """Give up root's id for good, before the first submission comes in."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 1, 0, 0, 0)  # or its files in /proc would stay root's


def answer(request: dict[str, Any], batch: bytes) -> tuple[bytes, str, list[float]]:
    """Run a batch in a fork. Return its answer, how it ended, or "" for a normal end, and what it took."""
    before = children_computed()
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out)
        enclosed(request, batch, into)
    os.close(into)
    data, began, ended, took = bytearray(), monotonic(), "", [0.0, 0.0, 0.0]
    while not ended:
        readable, _, _ = select.select([out], [], [], 0.02)
        if readable and not (part := os.read(out, 1 << 16)):
            break
        data += part if readable else b""
        took = times(child if request["weak"] else 0, monotonic() - began)
        ended = beyond(request, len(data), took)
    os.close(out)
    closed = monotonic()
    status = over(child, 0 if ended else 20, request["weak"])
    if not request["weak"]:
        settle()
    over_at = monotonic()
    took = [max(took[0], children_computed() - before), took[1] + over_at - closed, over_at - began]
    # The kernel may be the first to end what computes too long: that is slow, too.
    ended = ended or (ending(status) and (beyond(request, len(data), took) or ending(status)))
    return bytes(data[: request["limit"]]), ended, took


def times(session: int, passed: float) -> list[float]:
    """Return the seconds that the batch has computed, waited without being ready to run, and taken in all."""
    computed, ready = spent(session)
    return [computed, max(0.0, passed - computed - ready), passed]


def children_computed() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def beyond(request: dict[str, Any], size: int, took: list[float]) -> str:
    """Return the limit that the batch exceeds, or "". Limits of a process are set in `limits`.

    Computing time counts. Time in which the batch is ready to run, on a busy machine, is no waiting.
    """
    seconds = request["seconds"]
    if took[0] > seconds:
        return f"no answer within {seconds:g} s of computing"
    if took[1] > WAIT * seconds:
        return f"no answer within {WAIT * seconds:g} s, and it waits without computing"
    if took[2] > CLOCK * seconds:  # of many short processes not all that they compute is seen
        return f"no answer within {CLOCK * seconds:g} s"
    if any(one > left for one, left in zip(took, request["left"], strict=True)):
        return TOGETHER
    if size > request["limit"]:
        return f"an answer of more than {request['limit']:,} bytes"
    if request["weak"]:
        return ""
    processes, resident = crowd()
    if processes > PROCESSES:
        return f"more than {PROCESSES} processes"
    return f"more than {RESIDENT >> 20:,} MB of memory" if resident > RESIDENT else ""


def processes(*names: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the id of each process in the sandbox, and the texts of these files of it."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        texts = []
        with suppress(OSError):  # it has just ended
            for name in names:
                with open(f"/proc/{pid}/{name}") as file:
                    texts.append(file.read())
            if all(texts):
                yield int(pid), texts


def spent(session: int) -> tuple[float, float]:
    """Return the seconds that the batch's processes have computed, and were ready to run and did not.

    They are those of a session; or, if that is 0, all but init and this server.
    """
    computed = ready = 0.0
    for pid, (stat, schedstat) in processes("stat", "schedstat"):
        fields = stat.rpartition(")")[2].split()  # from the third on, the state
        if pid not in (1, os.getpid()) and session in (0, int(fields[3])):
            computed += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            ready += int(schedstat.split()[1]) / 1e9
    return computed, ready


def crowd() -> tuple[int, int]:
    """Return the number of processes in the sandbox, and the bytes of memory that they hold."""
    pages = [int(statm.split()[1]) for _, (statm,) in processes("statm")]
    return len(pages), sum(pages) * resource.getpagesize()


def over(child: int, seconds: float, weak: bool) -> int:
    """Return the exit status of the child, which is killed after `seconds`, with all that it started."""
    end = monotonic() + seconds
    ended = False
    while not ended and monotonic() < end:
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        sleep(0.001)
    if weak:  # without a namespace: at least the processes of its session
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    elif not ended:
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def settle(seconds: float = 60) -> None:
    """Wait until init and this server are alone again; if that takes too long, end the whole sandbox."""
    end = monotonic() + seconds
    while crowd()[0] > 2:
        if monotonic() > end:
            os._exit(1)
        sleep(0.005)


def ending(status: int) -> str:
    """Return how the child ended, or "" for a normal end."""
    code = os.waitstatus_to_exitcode(status)
    if number := -code if code < 0 else code - 128 if code > 128 else 0:
        return f"ended by a signal: {signal.strsignal(number) or number}"
    return f"ended with exit code {code}" if code else ""


def enclosed(request: dict[str, Any], batch: bytes, into: int) -> NoReturn:
    """Take new namespaces and limits in the fork, then fork again: the first process in them."""
    try:
        os.closerange(3, into)
        os.closerange(into + 1, 256)
        if request["weak"]:
            os.setsid()
        else:
            namespaces()
        inner = os.fork()
        if inner == 0:
            limits(request)
            run(batch, into)
        os.close(into)
        _, status = os.waitpid(inner, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code & 0x7F if code >= 0 else 128 - code)
    finally:
        os._exit(99)


def covered() -> list[str]:
    """Return the folders that a batch finds empty: the course, and packages that answer a lab."""
    places = [os.path.join(path, name) for path in sys.path for name in ("mini_engine", *ANSWERS)]
    return [sys.argv[3], *filter(os.path.isdir, places)]


def namespaces() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEWUSER | NEWNS | NEWIPC | NEWPID | NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None)
    for folder, more in ((SCRATCH, 0), *((one, MS_RDONLY) for one in reversed(covered()))):
        options = MS_NOSUID | MS_NODEV | more, b"size=16m,nr_inodes=256"
        if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", *options):
            raise OSError(ctypes.get_errno(), "mount")
    # Or a batch could leave a word in a file of the server's (oom_score_adj), whose forks inherit it.
    if libc.mount(None, b"/proc", None, MS_REMOUNT_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, None):
        raise OSError(ctypes.get_errno(), "remount")
    os.chdir(SCRATCH)


def limits(request: dict[str, Any]) -> None:
    """Drop all privileges and set hard limits. With its first process a PID namespace ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(seccomp.SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):
        libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capset(header, data)
    hard = {
        resource.RLIMIT_CPU: int(request["seconds"]) + 1,
        resource.RLIMIT_AS: request["memory"],
        resource.RLIMIT_NPROC: 32,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_FSIZE: 16 << 20,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_STACK: 8 << 20,
    }
    for kind, value in hard.items():
        resource.setrlimit(kind, (value, value))
    with suppress(*[OSError] if request["weak"] else []):
        seccomp.load()


def run(batch: bytes, into: int) -> NoReturn:
    """Run the submission; nothing that happens from here on is trusted."""
    from labs.kit.grader.player import play

    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    with os.fdopen(into, "wb") as out:
        play(json.loads(batch), out)
    os._exit(0)


if __name__ == "__main__":
    main()
