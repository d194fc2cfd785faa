"""The kernel refuses to a submission: system calls, keyrings, its settings, and the superuser's id."""

import errno
import json
import os
import platform
import subprocess
import sys

import pytest

from labs.kit.grader import inside, seccomp
from labs.kit.grader.grading import box
from labs.kit.tests import marks

# `opened` is a fixture, which only its name asks for: hence F401.
from labs.kit.tests.test_grader_attacks import LAB, SETTINGS, SOLUTION, graded, opened  # noqa: F401

THREAD, SIGCHLD = 0x3D0F00, 17
ALLOWED, REFUSED, NO_CALL = "allowed", errno.EPERM, errno.ENOSYS
CALLS = [(name, 0, REFUSED) for name in seccomp.CALLS if name not in seccomp.PARTLY] + [
    ("clone3", 0, NO_CALL),
    *(("clone", 1 << bit | SIGCHLD, REFUSED) for bit in (17, 25, 26, 27, 28, 29, 30)),
    ("clone", THREAD, ALLOWED),
    ("clone", SIGCHLD, ALLOWED),
    ("prctl", 1, REFUSED),
    ("prctl", 15, ALLOWED),  # a thread's name
    *(("fcntl", command, REFUSED if command in seccomp.LOCKS else ALLOWED) for command in range(1031)),
    *(("socket", family, ALLOWED if family in (1, 2, 10) else REFUSED) for family in range(46)),
]


def verdict(machine: str, number: int, argument: int = 0, architecture: int | None = None) -> object:
    """Return what the filter says of a call, by running it as the kernel would."""
    seen = {0: number, 4: architecture or seccomp.ARCHITECTURES[machine][0], 16: argument, 24: argument}
    code, at, value = seccomp.program(machine), 0, 0
    while True:
        kind, if_true, if_false, constant = code[at]
        at += 1
        if kind == 0x06:
            action, data = constant & 0xFFFF0000, constant & 0xFFFF
            return {0x7FFF0000: ALLOWED, 0x50000: data, 0x80000000: "killed"}[action]
        if kind == 0x20:
            value = seen[constant]
        else:
            holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[kind]
            at += if_true if holds else if_false


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_the_filter_says_of_each_call(machine, column):
    for name, argument, expected in CALLS:
        assert verdict(machine, seccomp.CALLS[name][column], argument) == expected, (name, argument)
    refused = {numbers[column] for numbers in seccomp.CALLS.values()}
    assert {verdict(machine, number) for number in set(range(424)) - refused} == {ALLOWED}
    assert verdict(machine, 0x40000000) == verdict(machine, 0x40000000 + 250) == "killed"  # x32
    assert verdict(machine, 20, architecture=0x40000003) == "killed"  # i386
    with pytest.raises(OSError, match="no filter"):
        seccomp.program("mips")


@marks.namespaces
def test_each_refused_call_is_refused_inside():
    column = seccomp.ARCHITECTURES[platform.machine()][1]
    calls = [(n, seccomp.CALLS[n][column], a, e) for n, a, e in CALLS if e != ALLOWED]
    assert len(calls) > 100
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, number, argument, expected in {calls!r}:
    got = libc.syscall(number, argument, argument, 0, 0, 0), ctypes.get_errno()
    assert got == (-1, expected), (name, argument, got)
"""
    lab = graded(code + SOLUTION)
    assert lab.earned == 100, lab.problem


@marks.namespaces
def test_the_second_abi_ends_the_batch():
    """x32 and i386 have every call under another number."""
    if platform.machine() != "x86_64":
        pytest.skip("this machine has one ABI only")
    lab = graded("import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)\n" + SOLUTION)
    assert lab.earned == 0 and "ended by a signal: Bad system call" in lab.problem


def test_what_the_kernel_ends_for_computing_too_long_is_too_slow(monkeypatch):
    """Where the server is kept from the processor, and the kernel's own limit is the first to be met."""
    monkeypatch.setattr(inside, "times", lambda *_: [0.0, 0.0, 0.0])
    facts = {"lab": "lab-01", "source": "while True: pass", "others": "", "allowed": None, "scripts": []}
    request = {"weak": True, "seconds": 0.5, "left": [9, 9, 9], "limit": 1 << 20, "memory": 4 << 30}
    _, ended, _ = inside.answer(request, json.dumps(facts).encode())
    assert ended == "no answer within 0.5 s of computing"


@marks.namespaces
def test_nothing_of_the_kernels_settings_can_be_written():
    code = """
import errno, os
tried = 0
for folder, _, names in os.walk("/proc/sys"):
    for path in (os.path.join(folder, name) for name in names):
        try:
            os.close(os.open(path, os.O_WRONLY))
        except OSError as error:
            tried += 1
        else:
            raise ValueError(path)
assert tried > 100 and os.access("/proc/sys/kernel/core_pattern", os.R_OK)
assert os.statvfs("/proc/sys").f_flag & os.ST_RDONLY
"""
    lab = graded(code + SOLUTION)
    assert lab.earned == 100, lab.problem


@marks.namespaces
def test_a_submission_is_not_the_superuser():
    """Neither by the id that it sees nor by the one that the kernel counts with."""
    assert graded(
        "import os\nassert os.getuid() and os.getgid() and not os.getgroups()[1:]\n" + SOLUTION
    ).earned
    bwrap = box(LAB, SETTINGS).process.pid
    server = [pid for pid in os.listdir("/proc") if pid.isdigit() and grandparent(pid) == bwrap]
    assert [os.stat(f"/proc/{pid}").st_uid for pid in server] == [os.getuid() or 65534]
    with open(f"/proc/{server[0]}/status") as file:
        assert "CapEff:\t0000000000000000" in file.read()


def grandparent(pid: str) -> int:
    return parent(parent(pid))


def parent(pid: int | str) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


KEYS = """
import ctypes, sys
from labs.kit.grader import inside, seccomp
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
column = seccomp.ARCHITECTURES[__import__("platform").machine()][1]
add, ctl = (seccomp.CALLS[name][column] for name in ("add_key", "keyctl"))
session, search = -3, 10
if libc.syscall(add, b"user", b"left", b"state", ctypes.c_size_t(5), session) < 0:
    sys.exit("no keyrings here")
found = lambda: libc.syscall(ctl, search, session, b"user", b"left", 0) > 0
assert found()
seccomp.forget_keys()
assert not found(), "the key is found"
"""


@marks.namespaces
def test_no_key_goes_from_one_batch_to_another():
    done = subprocess.run([sys.executable, "-c", KEYS], capture_output=True, text=True)
    if "no keyrings here" in done.stderr:
        pytest.skip("THE SESSION KEYRING IS NOT TESTED: this machine refuses keyctl to everybody")
    assert done.returncode == 0, done.stderr
