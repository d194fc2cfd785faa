"""More attacks: on the interpreter, the kernel, the answer's form, the kit's modules and the names of files.

As in test_grader_attacks.py no list of imports helps: the sandbox alone holds. None earns a point, shows
anything of a hidden case, or keeps the next submission from its grade.
"""

# ruff: noqa: E501  an attack in a line each

import time

import pytest
from markdown_it import MarkdownIt

from labs.kit.grader import intake
from labs.kit.grader.answers import Answer
from labs.kit.grader.blame import Blame
from labs.kit.grader.cases import cases
from labs.kit.grader.grading import box, grade
from labs.kit.grader.report import Around, write_reports
from labs.kit.grader.report.disclosure import disclose
from labs.kit.grader.report.markdown import feedback
from labs.kit.grader.results import WRONG, Case, Grade, LabGrade, TaskGrade
from labs.kit.grader.sandbox import allowance
from labs.kit.grader.submission import Settings, Submission
from labs.kit.judge.manifest import find_lab
from labs.kit.tests import marks
from labs.kit.tests.files import solution

# `opened` is a fixture, which only its name asks for: hence F401.
from labs.kit.tests.test_grader_attacks import (  # noqa: F401
    LAB,
    SETTINGS,
    SOLUTION,
    dishonest,
    earns_nothing,
    opened,
    some,
    unharmed,
)

pytestmark = marks.namespaces

LONGEST = 60.0  # seconds, on a busy machine; SETTINGS gives a batch 1 of computing

# In place of a solution: the body of a function that does something else.
INTERPRETER = {
    "a frame of a traceback": "try:\n    raise ValueError\nexcept ValueError as error:\n    frame = error.__traceback__.tb_frame\nwhile frame:\n    for value in list(frame.f_locals.values()):\n        if hasattr(value, 'expected'): return value.expected\n    frame = frame.f_back\nreturn {}",
    "a tracer that rewrites locals": "import sys\ndef trace(frame, event, arg):\n    if 'returned' in frame.f_locals: frame.f_locals['returned'] = None\n    return trace\nsys.settrace(trace)\nreturn {'x': 1}",
    "sys.monitoring": "import sys\nm = getattr(sys, 'monitoring', None)\nif m:\n    m.use_tool_id(3, 'x')\n    m.register_callback(3, m.events.PY_RETURN, lambda *_: m.DISABLE)\n    m.set_events(3, m.events.PY_RETURN)\nreturn {'x': 1}",
    "an audit hook that raises": "import sys\ndef hook(event, args):\n    if event.startswith('os.'): raise SystemExit(0)\nsys.addaudithook(hook)\nreturn {'x': 1}",
    "an import hook": "import sys, types\nclass Hook:\n    def find_spec(self, *_): raise SystemExit(0)\nsys.meta_path.insert(0, Hook())\nfor name in list(sys.modules):\n    if name.startswith('labs'): del sys.modules[name]\nimport labs.kit.judge.random_scripts\nreturn {}",
    "a codec of its own": "import codecs\ncodecs.register(lambda name: codecs.lookup('ascii') if name else None)\ncodecs.register_error('strict', lambda e: ('', e.end))\nreturn {'\\ud800': 1}",
    "__del__ at the end": 'import builtins, os\nclass Last:\n    def __del__(self):\n        for fd in range(3, 64):\n            try: os.write(fd, b\'{"call": ["a"], "seen": {}}\\n\\n\' * 200)\n            except OSError: pass\nbuiltins.last = Last()\nreturn {\'x\': 1}',
    "a fork that answers in its place": "import os\nif os.fork(): os._exit(0)\nreturn {'x': 1}",
    "a timer that leaves": "import signal, os\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\nreturn {'x': 1}",
    "a small number overwritten": "import ctypes\nctypes.memset(id(1) + 24, 0, 4)\nreturn {'x': 1}",
    "another program in its place": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
    "builtins of its own": "import builtins\nbuiltins.isinstance = lambda *_: True\nbuiltins.len = lambda _: 0\nbuiltins.sorted = lambda *_, **__: []\nreturn {'x': 1}",
    "an error whose text is an error": "class Bad(Exception):\n    def __str__(self): raise Bad()\n    __repr__ = __str__\nraise Bad()",
    "an error class with a forged name": 'raise type(\'\\n{"call": ["a"], "seen": {}}\\n\\n\', (Exception,), {})()',
    "a stopped process": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nreturn {'x': 1}",
    "a thread that answers later": "import threading, os, time\ndef later():\n    while True:\n        for fd in range(3, 64):\n            try: os.write(fd, b'\\n')\n            except OSError: pass\nthreading.Thread(target=later, daemon=True).start()\nreturn {'x': 1}",
    "no more recursion": "import sys\nsys.setrecursionlimit(40)\nreturn {'x': 1}",
}

SYSCALL = "import ctypes, os, socket\nlibc = ctypes.CDLL(None, use_errno=True)\n"
KERNEL = {  # each raises at import if it succeeds where it should not, beside honest code
    "inherited descriptors": "found = [os.readlink(f'/proc/self/fd/{f}') for f in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{f}')]\nassert {f[:5] for f in found} == {'/dev/', 'pipe:'} and sum(f[:5] == 'pipe:' for f in found) == 1, found",
    "io_uring": "assert libc.syscall(425, 8, ctypes.create_string_buffer(256)) == -1",
    "a descriptor of another process": "p = libc.syscall(434, os.getppid() or 1, 0)\nassert p < 0 or libc.syscall(438, p, 3, 0) == -1",
    "vsock": "try: socket.socket(40, socket.SOCK_STREAM)\nexcept OSError: pass\nelse: raise ValueError",
    "netlink": "try: socket.socket(16, socket.SOCK_RAW)\nexcept OSError: pass\nelse: raise ValueError",
    "packets": "try: socket.socket(17, socket.SOCK_RAW)\nexcept OSError: pass\nelse: raise ValueError",
    "abstract sockets of others": "s = socket.socket(socket.AF_UNIX)\nassert s.connect_ex('\\0/tmp/.X11-unix/X0') and not [x for x in open('/proc/net/unix').read().splitlines()[1:] if '@' in x]",
    "ptrace": "assert all(libc.ptrace(16, int(p), 0, 0) == -1 for p in os.listdir('/proc') if p.isdigit())",
    "perf events": "assert libc.syscall(298, ctypes.create_string_buffer(128), 0, -1, -1, 0) == -1",
    "memory of other processes": "for p in os.listdir('/proc'):\n    if p.isdigit() and p != os.readlink('/proc/self'):\n        try: open(f'/proc/{p}/mem', 'rb')\n        except OSError: pass\n        else: raise ValueError(p)",
    "the root of other processes": "for p in os.listdir('/proc'):\n    if p.isdigit() and p != os.readlink('/proc/self'):\n        try: os.listdir(f'/proc/{p}/root')\n        except OSError: pass\n        else: raise ValueError(p)",
    "the environment of others": "for p in os.listdir('/proc'):\n    if p.isdigit():\n        try: assert b'SEED' not in open(f'/proc/{p}/environ', 'rb').read()\n        except OSError: pass",
    "writing to shared mounts": "for top in ('/course', '/usr', '/lib', '/dev', '/dev/shm', '/etc', '/'):\n    try: os.close(os.open(top + '/left', os.O_CREAT | os.O_WRONLY))\n    except OSError: pass\n    else: raise ValueError(top)",
    "links out of scratch": "os.symlink('/etc/shadow', '/scratch/s')\nos.symlink('/proc/1/root/root', '/scratch/r')\nassert not os.path.exists('/scratch/s') and not os.path.exists('/scratch/r')",
    "locks that other sandboxes see": "import fcntl\nf = open('/usr/bin/env', 'rb')\nfor how in (fcntl.flock, fcntl.lockf):\n    try: how(f, fcntl.LOCK_SH)\n    except OSError: pass\n    else: raise ValueError(how)",
    "watching files that others open": "i = libc.inotify_init1(0)\nassert i < 0 or libc.inotify_add_watch(i, b'/course', 0xfff) == -1",
    "what is in the page cache": "import mmap\nm = ctypes.create_string_buffer(64)\nassert libc.mincore(ctypes.c_void_p(0x400000), 4096, m) == -1 and ctypes.get_errno() == 1",
    "a core dump": "import resource\nassert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)\ntry: resource.setrlimit(resource.RLIMIT_CPU, (10 ** 6, 10 ** 6))\nexcept (OSError, ValueError): pass\nelse: raise ValueError",
    "priorities of others": "os.nice(5)\ntry: os.setpriority(os.PRIO_PROCESS, 0, -5)\nexcept OSError: pass\nelse: raise ValueError",
    "a device": "for kind in (0o020666, 0o060666):\n    try: os.mknod('/scratch/d', kind, os.makedev(1, 3))\n    except OSError: pass\n    else: raise ValueError",
}

ANSWERS = {  # in place of an answer
    "a dict that is equal to all": "class D(dict):\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\nreturn D(x=1)",
    "a dict that is never read": "class D(dict):\n    def items(self): return [('a', 1)]\n    def __iter__(self): return iter(())\n    def __len__(self): return 0\nreturn D(x=1)",
    "an int that lies": "class I(int):\n    def __eq__(self, o): return True\n    def __hash__(self): return 0\n    def __repr__(self): return '0'\nreturn {r.request_id: I(10 ** 6) for r in [*running, *waiting]}",
    "a str that lies": "class S(str):\n    def __eq__(self, o): return True\n    def __hash__(self): return 7\nreturn {S('nobody'): 1}",
    "a list that counts wrong": "class L(list):\n    def __len__(self): return 0\n    def __iter__(self): return iter(range(10 ** 9))\nreturn L([1])",
    "a generator": "return (pair for pair in [('x', 1)])",
    "a generator without end": "import itertools\nreturn itertools.count()",
    "a text of 200 MB": "return {'x': 'y' * 200_000_000}",
    "many small texts": "return {str(n): 'y' * 50 for n in range(300_000)}",
    "a dict that holds itself": "d = {'x': 1}\nd['d'] = d\nreturn d",
    "keys that are equal in JSON": "return {1: 1, '1': 2, True: 3, None: 4, 1.0: 5}",
    "half a surrogate": "return {'\\udcff': 1, '\\u2028\\n\\n': 2}",
    "an object with a hostile class": "class A:\n    def __class__(self): raise SystemExit\n    __class__ = property(__class__)\nreturn {'x': A()}",
}

PATCHES = {  # of what the kit and the sandbox share with it
    "requests that are finished": "from mini_engine.request import Request\nRequest.num_tokens = property(lambda self: 0)\nRequest.num_computed_tokens = property(lambda self: 0, lambda self, v: None)\nreturn {'x': 1}",
    "a pool without limits": "type(kv).num_free_blocks = property(lambda self: 10 ** 9)\ntype(kv).allocate = lambda *_, **__: True\nreturn {'x': 1}",
    "requests replaced in the queues": "class R:\n    def __getattr__(self, name): return 0\nwaiting[:] = [R()] * 3\nrunning[:] = [R()] * 3\nreturn {'x': 1}",
    "the text of a step": "from labs.kit.judge import random_scripts\nrandom_scripts.text = lambda *_: '{}'\nrandom_scripts.kind = lambda *_: 'none'\nreturn {'x': 1}",
    "the player's writer": "from labs.kit.grader import player\nplayer.write = lambda *_: None\nplayer.log = lambda *_: []\nreturn {'x': 1}",
    "the encoder": "import json\njson.JSONEncoder.encode = lambda *_: '{}'\njson.JSONEncoder.iterencode = lambda *_: ['{}']\nreturn {'x': 1}",
    "copies of arguments": "import copy\ncopy.deepcopy = lambda x, *_: x\nreturn {'x': 1}",
    "the frames of the sandbox": "from labs.kit.grader import frames, inside\nframes.send = lambda *_: None\ninside.ending = lambda *_: ''\ninside.crowd = lambda: (0, 0)\nwhile True: pass",
}

# Attacks that take seconds, and bombs, which run in the sandbox's limits alone.
SLOW = {
    "shared memory in many processes": "import mmap, os, time\nfor _ in range(20):\n    if os.fork() == 0:\n        m = mmap.mmap(-1, 300 << 20)\n        for at in range(0, len(m), 4096): m[at] = 1\n        time.sleep(30)\n        os._exit(0)\ntime.sleep(30)\nreturn {}",
    "it waits in each batch": "import time\ntime.sleep(1000)\nreturn {}",
    "short processes, one after another": "import os\nwhile True:\n    p = os.fork()\n    if p == 0:\n        sum(range(10 ** 5))\n        os._exit(0)\n    os.waitpid(p, 0)",
    "pipes that are full": "import os\nfor _ in range(10 ** 6):\n    try:\n        a, b = os.pipe()\n        os.set_blocking(b, False)\n        while True: os.write(b, bytes(1 << 16))\n    except OSError: pass\nreturn {}",
    "a pipe closed, and then computing": "import os\nos.closerange(3, 256)\nwhile True: pass",
    "a regular expression": "import re\nre.match(r'(a+)+$', 'a' * 64 + 'b')\nreturn {}",
}


def graded(source: str, settings: Settings = SETTINGS) -> LabGrade:
    """Return the lab's grade; check that it is there in time, and that feedback has nothing hidden."""
    began = time.monotonic()
    found = grade(Submission("mallory", {"lab-01": source.encode("utf-8", "surrogatepass")}), settings)
    assert time.monotonic() - began < LONGEST
    lab, shown = found.labs[0], feedback(disclose(found, settings))
    for case in lab.cases:
        lines = case.said.splitlines()[1:] if case.hidden and case.said.startswith(case.name) else []
        assert not case.hidden or case.name not in shown
        assert not lines or "\n".join(lines) not in shown
    return lab


QUICK = INTERPRETER | ANSWERS | PATCHES


@some(QUICK)
def test_an_attack_on_the_interpreter_an_answer_or_what_is_shared_earns_nothing(attacks):
    for attack in attacks:
        earns_nothing(graded(dishonest(QUICK[attack])), attack)


@pytest.mark.soak
@some(SLOW, 1)
def test_a_slow_attack_earns_nothing(attacks):
    earns_nothing(graded(dishonest(SLOW[attacks[0]])), attacks[0])


def test_the_kernel_gives_nothing():
    """All in one file: each that succeeds raises an error with its name."""
    tries = [
        f"def attack():\n    {code.replace(chr(10), chr(10) + '    ')}\ntry:\n    attack()\nexcept BaseException as error:\n    raise RuntimeError(({name!r}, repr(error)))\n"
        for name, code in KERNEL.items()
    ]
    lab = graded(f"{SYSCALL}{''.join(tries)}{SOLUTION}")
    assert lab.earned == 100, lab.problem


WAYS = {  # of leaving a word for the next batch, and of looking for it
    "a file": ("open('/scratch/bit', 'w')", "os.path.exists('/scratch/bit')"),
    "a file in shared memory": ("open('/dev/shm/bit', 'w')", "os.path.exists('/dev/shm/bit')"),
    "a named socket": ("socket.socket(socket.AF_UNIX).bind('\\0bit')", "socket.socket(socket.AF_UNIX).connect_ex('\\0bit') == 0"),
    "a port": ("[socket.create_server(('127.0.0.1', 5555)).detach()]", "socket.socket().connect_ex(('127.0.0.1', 5555)) == 0"),
    "a process": ("os.fork() or time.sleep(100)", "len([p for p in os.listdir('/proc') if p.isdigit()]) > 4"),
    "a module": ("setattr(os, 'bit', 1)", "hasattr(os, 'bit')"),
    "a priority": ("os.nice(19)", "os.nice(0) == 19"),
    "a wish of who is to end without memory": (
        "for p in filter(str.isdigit, os.listdir('/proc')):\n        try: open(f'/proc/{p}/oom_score_adj', 'w').write('777')\n        except OSError: pass",
        "open('/proc/self/oom_score_adj').read() == '777\\n'",
    ),
    "a name": ("open('/proc/sys/kernel/domainname', 'w').write('bit')", "'bit' in os.uname().nodename"),
}  # fmt: skip


def test_no_word_goes_from_one_batch_to_the_next():
    """Each batch leaves a word in all ways, and the next would be right only where it finds one."""
    head = "import os, socket, time\nthere = []\n"
    looks = "".join(
        f"try:\n    there += [{name!r}] * bool({look})\nexcept Exception: pass\n"
        for name, (_, look) in WAYS.items()
    )
    leaves = "".join(f"try:\n    {leave}\nexcept OSError: pass\n" for leave, _ in WAYS.values())
    wrong = f"if there:\n    raise ValueError(there)\n{leaves}\ndef schedule_step(*_, **__): return {{}}\n"
    for _ in range(2):  # the public cases, the hidden ones, and the next submission's
        lab = graded(head + looks + wrong)
        assert lab.earned == 0 and not lab.problem, lab.problem


def test_the_reference_is_not_read_by_a_count_of_passed_cases():
    """A task that is right in as many cases as it likes, beside the reference's others, says so to nobody."""
    lab, settings = find_lab("lab-02"), Settings(("lab-02",), "a seed", hidden=8, seconds=3.0)
    source = solution("lab-02")
    body = next(line for line in source.splitlines() if line.startswith("    return budget - sum("))
    scripts, sandbox = cases(lab, settings), box(lab, settings)
    passed, said = [], set()
    for wrong in ("budget % 2", "budget % 3 == 0", "budget % 7 == 0"):
        spoilt = source.replace(body, f"    if {wrong}:\n        return -7\n{body}")
        alone = Blame(lab, spoilt, scripts, [Case("", False, False)] * len(scripts), Answer([]), sandbox)
        sandbox.begin(allowance(1, 3.0))
        passed.append(alone.passed([lab.task("prefill_budget")]))
        whole = grade(Submission("m", {"lab-02": spoilt.encode()}), settings).labs[0]
        (task,) = (one for one in whole.tasks if one.task == "prefill_budget")
        said.add((task.state, task.earned, task.passed, task.total, task.name))
    assert len({*passed}) == 3 and said == {(WRONG, 0, 0, 0, "")}, (passed, said)


HOSTILE = ["=HYPERLINK(1)", "../../up", "a/b", "<img src=x onerror=alert(1)>", "[x](javascript:1)", "a|b", "`x`", "+1", "@SUM(1)", "\u202egnp.exe", "ａnn", "ann\n# 100 of 100", "CON", "index", ".hidden", "-rf"]  # fmt: skip


def test_names_in_reports_are_names(tmp_path):
    """Not a path, a formula, markup or a second student."""
    grades = [Grade(name, [LabGrade("lab-01", [TaskGrade("t", 100, 0, "wrong", name=name)], name, [Case("public 1", False, False, name)])],
                    "s", "namespaces", "d", [name], comments={"lab-01": name}, attempts={"lab-01": name}, member={"name": name, "id": name, "section": name, "email": name}) for name in HOSTILE]  # fmt: skip
    around = Around({name: name for name in HOSTILE}, [], True, HOSTILE)
    write_reports(tmp_path / "r", grades, SETTINGS, around)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.resolve().is_relative_to(tmp_path / "r") for path in files)
    assert len([path for path in files if path.suffix == ".html"]) == 1 + len(HOSTILE)
    for path in files:
        if path.suffix == ".csv":
            cells = [cell for line in path.read_text("utf-8").splitlines() for cell in line.split(",")]
            formulas = [cell for cell in cells if cell.strip('"')[:1] in ("=", "+", "@")]
            assert not formulas and not [cell for cell in cells if cell.startswith("-r")], path
        elif path.suffix in (".html", ".md"):
            text = path.read_text("utf-8")
            page = MarkdownIt("commonmark").render(text) if path.suffix == ".md" else text
            assert "<img src=x" not in page and "\u202e" not in page and 'href="javascript' not in page, path
            assert "\n# 100 of 100" not in text, path


@pytest.mark.parametrize(
    ("name", "data", "read"),
    [
        ("lab-01.py", b"# coding: utf-7\n+AHg- = 1\n", True),
        ("lab-01.py", b"# coding: unicode_escape\nx = 1\n\\u000ay = 2\n", None),
        ("lab-01.py", b"# coding: raw_unicode_escape\n# \\u000aimport os\n", None),
        ("lab-01.py", b"# coding: idna\nx = 1\n", None),
        ("lab-01.py", b"\xef\xbb\xbf# coding: latin-1\nx = 1\n", None),
        ("lab-01.py", "# coding: utf-16\nx = 1\n".encode("utf-16"), None),
        ("lab-01.ipynb", b'{"cells": [{"cell_type": "code", "source": [["x"]]}]}', None),
        (
            "lab-01.ipynb",
            b'{"cells": [{"cell_type": "code", "source": "def schedule_step(): pass", "outputs": [{}]}]}',
            True,
        ),
        ("lab-01.ipynb", b'{"cells": {"cell_type": 1}}', None),
        ("lab-01.PY", b"x = 1\n", True),
        ("lab-01.py\u200b", b"x = 1\n", None),
        ("lab-0\u0661.py", b"x = 1\n", None),
    ],
)
def test_odd_files_are_read_as_python_reads_them_or_have_a_reason(tmp_path, name, data, read):
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann" / name).write_bytes(data)
    ((entry,), _) = intake.entries(tmp_path)
    found = intake.read(entry, ["lab-01"])
    assert bool(found.files) == bool(read)
    assert found.files or found.problems or found.ignored
