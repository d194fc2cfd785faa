"""No submission gains by an attack: it earns what its honest code earns, and the next one is unaffected."""

# ruff: noqa: E501  an attack in a line each

import ast
import json
import os
import subprocess
import textwrap
import time
import tracemalloc
import types
import zlib
from pathlib import Path

import pytest

from labs.kit.grader import answers, grading, results, sandbox
from labs.kit.grader.cases import cases, expected, judged
from labs.kit.grader.grading import box, grade
from labs.kit.grader.results import RIGHT, WRONG
from labs.kit.grader.submission import Settings, Submission
from labs.kit.judge import random_scripts
from labs.kit.judge.manifest import find_lab, functions, lab_ids
from labs.kit.tests import marks
from labs.kit.tests.files import solution
from mini_engine.tests.soak import SOAK

pytestmark = marks.namespaces

LAB = find_lab("lab-01")
SOLUTION = solution("lab-01")
SETTINGS = Settings(("lab-01",), "a seed", hidden=8, seconds=1.0)

# In place of a solution: the body of a function that does something else.
DISHONEST = {
    "leaves with 0": "import os\nos._exit(0)",
    "leaves with sys.exit": "import sys\nsys.exit(0)",
    "skips": "import pytest\npytest.skip('nothing to see')",
    "xfails": "import pytest\npytest.xfail('as expected')",
    "ends pytest": "import pytest\npytest.exit('all passed', 0)",
    "equals everything": "return type('Any', (dict,), {'__eq__': lambda *_: True, '__hash__': None})()",
    "looks for the oracle": "import gc\nmodels = [o for o in gc.get_objects() if getattr(o, '__name__', '') == 'schedule_step']\n"
    "others = [m for m in models if m.__code__.co_filename != 'starter.py']\n"
    "return others[0](waiting, running, kv, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)",
    "reads its caller's frames": "import sys\nframe = sys._getframe()\nwhile frame:\n    for value in frame.f_locals.values():\n"
    "        if type(value).__name__ == 'Step' and value.call: return value.seen\n    frame = frame.f_back\nreturn {}",
    "imports the solution by path": "import runpy\nglobal schedule_step\n"
    "schedule_step = runpy.run_path('/course/labs/lab-01/solution.py')['schedule_step']\n"
    "return schedule_step(waiting, running, kv)",
    "imports the solution by the kit": "from labs.kit import load\nreturn load('lab-01', 'solution').schedule_step(waiting, running, kv)",
    "imports the oracle": "from labs.kit import load\nreturn load('lab-01', 'oracle').schedule_step(waiting, running, kv,"
    " max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)",
    "sets LAB_IMPL": "import os\nos.environ['LAB_IMPL'] = 'solution'\nfrom labs.kit.judge.loading import namespace\n"
    "return namespace('lab-01', 'engine').schedule_step(waiting, running, kv)",
    "imports the engine's answer": "from mini_engine.scheduler import schedule_step\n"
    "return schedule_step(waiting, running, kv, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)",
    "imports it from an installed copy": "import sys, importlib\nfor name in [n for n in sys.modules if n.startswith('mini_engine')]:\n"
    "    del sys.modules[name]\nsys.path[:] = [p for p in sys.path if p != '/course']\n"
    "module = importlib.import_module('mini_engine.scheduler')\n"
    "return module.schedule_step(waiting, running, kv, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)",
    "prints that it passed": "print('PASSED', '1 passed in 0.01s')\nopen('results.json', 'w').write('{\"score\": 100}')\nreturn {}",
    "writes to every descriptor": 'import os\nfor fd in range(256):\n    try:\n        os.write(fd, b\'{"answer": "[]"}\\n\' * 9)\n    except OSError:\n        pass\nreturn {}',
    "answers early": "import os, json\nfor fd in range(3, 64):\n    try:\n        os.write(fd, json.dumps([{'call': ['step'], 'seen': {}}]).encode() + b'\\n')\n"
    "    except OSError:\n        pass\nos._exit(0)",
    "a guessed id": "import os, json, struct\ndata = json.dumps({'id': '0' * 32, 'answer': '', 'ended': ''}).encode()\n"
    "for fd in range(3, 64):\n    try:\n        os.write(fd, struct.pack('>I', len(data)) + data)\n    except OSError:\n        pass\nreturn {}",
    "not a number": "return {r.request_id: float('nan') for r in running}",
    "no end of a number": "return {r.request_id: float('inf') for r in running}",
    "true for one": "return {r.request_id: True for r in running}",
    "a huge number": "return {r.request_id: 10 ** 5000 for r in running}",
    "deep nesting": "x = []\nfor _ in range(100_000):\n    x = [x]\nreturn {'a': x}",
    "a pickle": "import pickle, os\nreturn {'a': pickle.dumps(os.system)}",
    "a loop that ignores SIGTERM": "import signal\nfor s in range(1, 30):\n    try:\n        signal.signal(s, signal.SIG_IGN)\n    except OSError:\n        pass\nwhile True:\n    pass",
    "a fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "a memory bomb": "x = []\nwhile True:\n    x.append(bytearray(1 << 24))",
    "fills the disk": "import os\nfor n in range(10_000):\n    try:\n        open(f'/scratch/{n}', 'wb').write(bytes(1 << 22))\n    except OSError:\n        break\nreturn {}",
    "floods stdout": "import os\nfor _ in range(10_000):\n    print('x' * 10_000)\nreturn {}",
    "a daemon that holds on": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)\n    os._exit(0)\nreturn {}",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nreturn {}",
    "kills every process": "import os, signal\nos.kill(-1, signal.SIGKILL)\nreturn {}",
    "connects outside": "import socket\nsocket.create_connection(('1.1.1.1', 53), 1)\nreturn {}",
    "raises with a secret": "import os\nraise RuntimeError(str(dict(os.environ)) + open('/proc/self/maps').read())",
    "recurses": "def deeper(n):\n    return deeper(n + 1) + 1\nreturn deeper(0)",
    "recurses in C": "import sys\nsys.setrecursionlimit(10 ** 9)\nx = []\nfor _ in range(10 ** 6):\n    x = [x]\nreturn {repr(x): 1}",
    "a segfault": "import ctypes\nctypes.string_at(0)",
    "overwrites the score": "import builtins, json\njson.dumps = lambda *_, **__: '[]'\nreturn {}",
    "patches the play": "from labs.kit.judge import random_scripts\nrandom_scripts.played = lambda *_: iter(())\nreturn {}",
    "closes everything": "import os\nos.closerange(0, 256)\nreturn {}",
}

# Beside honest code, which must earn all its points, and affect no other submission.
BESIDE = {
    "hooks of errors": "import atexit, sys, threading, time\natexit.register(time.sleep, 1000)\nsys.excepthook = sys.unraisablehook = threading.excepthook = lambda *_: print('x')",
    "monkeypatches time and random": "import time, random\ntime.monotonic = lambda: 0.0\ntime.time = lambda: 0.0\nrandom.random = lambda: 0.5",
    "prints at import": "print('x' * 1000)",
    "a thread that goes on": "import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()",
    "leaves a file": "open('/scratch/left', 'w').write('from one to the next')",
    "binds LAB_IMPL": "import os\nos.environ['LAB_IMPL'] = 'starter'",
}

# At import, before honest code that is never reached.
AT_IMPORT = {
    "leaves at import": "import os\nos._exit(0)",
    "leaves at exit": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit",
    "leaves in a thread": "import os, threading, time\nthreading.Thread(target=lambda: os._exit(0)).start()\ntime.sleep(1)",
    "a syntax error": "def schedule_step(:",
    "a null byte": "x = '\0'",
}


def graded(source: str | bytes, settings: Settings = SETTINGS):
    data = source.encode() if isinstance(source, str) else source
    return grade(Submission("mallory", {"lab-01": data}), settings).labs[0]


def dishonest(body: str) -> str:
    return SIGNATURE + textwrap.indent(body, "    ") + "\n"


SIGNATURE = """
def schedule_step(waiting, running, kv, *, max_num_batched_tokens=8, max_num_seqs=8,
                  long_prefill_token_threshold=0, clamp=None):
"""


OPENED: dict[str, sandbox.Sandbox] = {}


@pytest.fixture(autouse=True)
def opened(few_cases):
    """Let attacks import what they like: the sandbox holds without the list of imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grading, "_boxes", OPENED)  # in a sandbox of their own
        patch.setattr(sandbox.imports, "allowed", lambda _: None)
        # Loaded before the server becomes nobody, to which a machine may refuse the interpreter's folder.
        tools = "codecs ctypes fcntl mmap multiprocessing pickle resource runpy signal socket threading"
        patch.setattr(sandbox.imports, "HARMLESS", tools.split())
        patch.setattr(box(LAB, SETTINGS), "allowed", None)
        yield


@pytest.fixture(autouse=True)
def unharmed():
    """Check after some attacks that the next submission earns all points, and no process is left."""
    yield
    honest = graded(SOLUTION)
    assert honest.earned == 100, [case.said for case in honest.cases if not case.passed][:1]
    end = time.monotonic() + 3
    while (left := sandboxed()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left, f"processes are left: {left}"


def sandboxed() -> list[str]:
    """Return the processes below the sandbox's server (bwrap, init, server), which has none between batches."""
    children: dict[int, list[int]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(pid))
    (init,) = children[box(LAB, SETTINGS).process.pid]
    (server,) = children[init]
    return [str(pid) for pid in children.get(server, ())]


def some(attacks: dict[str, str], number: int = 7) -> pytest.MarkDecorator:
    """Give a test some attacks at a time, by name: the honest submission after them is graded once."""
    names = [*attacks]
    parts = [names[at : at + number] for at in range(0, len(names), number)]
    return pytest.mark.parametrize("attacks", parts, ids=lambda part: f"{part[0]} to {part[-1]}")


def earns_nothing(lab, attack):
    assert lab.earned == 0 and lab.tasks[0].state == WRONG, attack
    # In some cases it is right to schedule nothing, or to raise an error.
    assert sum(case.passed for case in lab.cases) < len(lab.cases) / 4, attack


@some(DISHONEST)
def test_an_attack_in_place_of_honest_code_earns_nothing(attacks):
    for attack in attacks:
        earns_nothing(graded(dishonest(DISHONEST[attack])), attack)


@some(BESIDE)
def test_an_attack_beside_honest_code_changes_nothing(attacks):
    for attack in attacks:
        lab = graded(SOLUTION + "\n" + BESIDE[attack] + "\n")
        assert lab.earned == 100 and lab.tasks[0].state == RIGHT, (attack, lab.problem)


@some(AT_IMPORT)
def test_an_attack_at_import_earns_nothing(attacks):
    for attack in attacks:
        lab = graded(AT_IMPORT[attack] + "\n" + SOLUTION)
        assert lab.earned == 0 and lab.problem, attack


def test_code_that_is_right_in_the_public_cases_alone_earns_nothing():
    key = "repr(([(r.request_id, r.num_computed_tokens) for r in running], len(waiting), kv.num_free_blocks))"
    wrapped = f"{SOLUTION}\nhonest, known = schedule_step, set()\n"
    wrapped += f"def schedule_step(waiting, running, kv, **options):\n    key = {key}\n"
    call = "    return honest(waiting, running, kv, **options)"
    module = types.ModuleType("noting")
    exec(f"{wrapped}    known.add(key)\n{call}\n", module.__dict__)
    for number in range(random_scripts.count("lab-01")):
        random_scripts.run("lab-01", module, random_scripts.drawn("lab-01", number))
    lab = graded(wrapped.replace("set()", repr(module.known)) + f"{call} if key in known else {{}}\n")
    assert {case.hidden for case in lab.cases if not case.passed} == {True} and lab.earned == 0


def test_nothing_is_carried_from_one_submission_to_the_next():
    """Neither by a file, nor by a module that both import, nor by the environment."""
    leaving = "import json, os\njson.left = 1\nos.environ['LEFT'] = '1'\nopen('/scratch/left', 'w').close()\n"
    assert graded(leaving + SOLUTION).earned == 100
    looking = "import json, os\nassert not hasattr(json, 'left') and 'LEFT' not in os.environ\nassert not os.listdir('/scratch')\n"
    assert graded(looking + SOLUTION).earned == 100


READS_ITS_SCRIPTS = """
import json, sys, zlib
frame = sys._getframe()
while "request" not in frame.f_locals:
    frame = frame.f_back
texts = [json.dumps(script, sort_keys=True) for script in frame.f_locals["request"]["scripts"]]
scripts = [zlib.crc32(text.encode()) for text in texts]
"""


def test_no_hidden_case_gets_into_what_a_student_is_shown():
    """Neither in an answer to a public case, nor in the error of a file that does not load."""
    played = ((json.loads(case.script), case.hidden) for case in cases(LAB, SETTINGS))
    scripts = {zlib.crc32(json.dumps(one, sort_keys=True).encode()): hidden for one, hidden in played}
    line = "json.dumps({'call': ['all'], 'seen': {'all': scripts}})"
    writing = f"frame.f_locals['out'].write({line}.encode() + b'\\n\\n')\nframe.f_locals['out'].flush()\n"
    (step,) = graded(f"{READS_ITS_SCRIPTS}{writing}import os\nos._exit(0)\n").yours["steps"]
    assert {*step["seen"]["all"]} == {script for script, hidden in scripts.items() if not hidden}
    public = sum(not hidden for hidden in scripts.values())
    raising = f"if len(scripts) != {public}:\n    raise ValueError(scripts)\n"
    lab = graded(f"{READS_ITS_SCRIPTS}\n{raising}{SOLUTION}")
    assert lab.problem == "after all public cases, in the hidden ones: its process ended"


PARSED = answers.PARSED if SOAK else 1 << 18


@pytest.mark.parametrize("line", ["[]," * (PARSED // 6) + "[]", "0"], ids=["few lines", "many lines"])
def test_an_answer_is_parsed_up_to_a_limit(line, monkeypatch):
    """256 kB of what no right answer has, in a soak the grader's own 4, take a moment and little memory."""
    monkeypatch.setattr(answers, "PARSED", PARSED)
    step = f'{{"call": ["a"], "seen": {{"returned": [{line}]}}}}\n'
    text = step * (2 * PARSED // len(step))
    tracemalloc.start()
    answer = answers.believed(text + "\n", "", [{}])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"more than {PARSED:,} bytes of it are wrong" in answer.ended and not answer.logs
    assert most < 48 * PARSED, most


def test_a_run_that_no_page_shows_is_not_kept():
    """Four megabytes of one would take the reports half a minute. The case's story is there, up to a limit."""
    case = cases(LAB, SETTINGS)[0]
    first = next(step for step in expected("lab-01", case.script).steps if step.seen.get("returned"))
    for size, is_kept in ((10, True), (results.RUN, False)):
        returned = {f"{number:07}": 1 for number in range(size // 10)}
        answer = answers.Answer([[random_scripts.Step(first.call, {"returned": returned})]])
        lab = results.LabGrade("lab-01", [], cases=[judged(LAB, case, 0, answer)])
        grading.keep_first_departure(LAB, lab, [case], answer, False)
        assert (lab.yours is not None) == is_kept and 0 < len(lab.cases[0].said) <= results.STORY


INSIDE = {
    "no process but its own": "all(int(p) <= 3 for p in os.listdir('/proc') if p.isdigit()) or not os.path.exists('/proc/1/root/etc')",
    "no passwords": "not os.path.exists('/etc/passwd') and not os.path.exists('/etc/shadow')",
    "no home": "not os.path.exists('/root/.ssh') and not os.path.exists('/home')",
    "no solution": "not any('solution.py' in files or 'oracle.py' in files or 'test_lab.py' in files for _, _, files in os.walk('/course/labs'))",
    "nothing to write to": "{p for p in [line.split()[4] for line in open('/proc/self/mountinfo')]"
    " if os.path.isdir(p) and os.access(p, os.W_OK)} <= {'/scratch', '/dev/pts'}",  # which takes no files
    "an empty environment": "set(os.environ) <= {'OMP_NUM_THREADS', 'PATH', 'HOME', 'TMPDIR', 'PWD', 'LC_CTYPE'}",
    "no network": "len(os.listdir('/sys/class/net')) <= 1 if os.path.exists('/sys/class/net') else True",
}


def test_what_there_is_inside():
    facts = "".join(f"assert {fact}, {name!r}\n" for name, fact in INSIDE.items())
    lab = graded(f"import os\n{facts}{SOLUTION}")
    assert lab.earned == 100, lab.problem


@pytest.mark.soak
def test_the_engines_answers_are_stubs_inside(tmp_path):
    """A quick test, in which each lab is graded, looks for them in memory: see test_grader_honest."""
    for lab in map(find_lab, lab_ids()):
        course = sandbox.course_for(lab, tmp_path / lab.id)
        for module, names in sandbox.twins(lab).items():
            found = functions((course / f"{module.replace('.', '/')}.py").read_text("utf-8"))
            for name in names:
                parts = [ast.unparse(node) for key, node in found.items() if f"{key}.".startswith(f"{name}.")]
                assert parts and all("not available here" in part for part in parts), name


def test_a_module_that_is_gone_leaves_nothing_compiled_inside(tmp_path):
    """An older version's answers stay in __pycache__ of a checkout that was updated."""
    compiled = tmp_path / "course" / "__pycache__"
    compiled.mkdir(parents=True)
    for name in ("here.py", "train.py"):
        (tmp_path / "course" / name).touch()
    for name in ("here", "gone", "train"):
        (compiled / f"{name}.cpython-311.pyc").touch()
    sandbox.copy(tmp_path / "course", tmp_path / "inside")
    names = [path.name for path in (tmp_path / "inside").rglob("*.py*")]
    assert names == ["here.py", "here.cpython-311.pyc"]


def test_scratch_hides_no_interpreter(monkeypatch, tmp_path):
    """Also with a virtual environment below /tmp."""
    monkeypatch.setattr(sandbox.sys, "prefix", str(tmp_path))
    line = sandbox.surroundings()
    empty = [Path(line[at + 1]) for at, word in enumerate(line) if word == "--tmpfs"]
    seen = [Path(line[at + 2]) for at, word in enumerate(line) if word == "--ro-bind"]
    assert tmp_path in seen and len(empty) == 1
    assert not any(path.is_relative_to(empty[0]) for path in seen)


def test_a_course_in_a_folder_that_is_seen_inside_is_empty_there(monkeypatch):
    """The course lies in a virtual environment that was made around it."""
    monkeypatch.setattr(sandbox.sys, "prefix", str(sandbox.ROOT))
    for words, there in (([], "solution.py"), (sandbox.emptied(), "")):
        line = [*sandbox.surroundings(), *words, "/bin/ls", "-R", str(sandbox.LABS_DIR)]
        shown = subprocess.run(line, capture_output=True, text=True)
        assert not shown.returncode and there in shown.stdout and bool(there) == ("lab-01" in shown.stdout)


def test_a_loopback_server_outside_is_not_reached():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        lab = graded(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\n" + SOLUTION)
    assert lab.earned == 0 and "does not load" in lab.problem


ODD = {
    b"": WRONG,
    b"def clamp(): pass\n": WRONG,
    b"def schedule_step(): return {}\n": WRONG,
    # Deeper than Python reads, and than a tool goes that is written in it.
    f"{SOLUTION}\nx = lambda: a{'.b' * 5000}\n".encode(): WRONG,
    SOLUTION.replace("    budget = ", f"    y = lambda: a{'.b' * 1500}\n    budget = ").encode(): RIGHT,
}


def test_odd_files():
    for data, state in ODD.items():
        lab = graded(data)
        assert lab.tasks[0].state == state, data
        assert lab.earned == (100 if state == RIGHT else 0)


def test_without_namespaces_nothing_is_graded(monkeypatch):
    monkeypatch.setattr(grading, "isolation", lambda: "limits")
    with pytest.raises(grading.WeakIsolation):
        graded(SOLUTION)


def test_weak_isolation_still_has_limits(monkeypatch):
    """Without namespaces a loop ends, honest code earns all points, and the grade names the isolation."""
    monkeypatch.setattr(grading, "isolation", lambda: "limits")
    monkeypatch.setattr(grading, "_boxes", {})
    weak = Settings(("lab-01",), "a seed", hidden=8, seconds=1.0, weak=True)
    found = grade(Submission("ada", {"lab-01": SOLUTION.encode()}), weak)
    assert (found.isolation, found.earned) == ("limits", 100)
    assert graded(dishonest("while True:\n    pass"), weak).earned == 0
    assert graded(dishonest(DISHONEST["imports the oracle"]), weak).earned == 0
    grading._boxes.popitem()[1].stop()
