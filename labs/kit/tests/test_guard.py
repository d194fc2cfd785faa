"""The guards end code that does not end, and nothing else."""

import contextlib
import itertools
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from labs.kit.author.check import right
from labs.kit.judge import clock, guard
from labs.kit.judge.guard import FLOOD, PrintFlood, TimeUp, TimeUpWaiting, deadline, limited_prints
from labs.kit.judge.manifest import find_lab, lab_ids
from labs.kit.judge.processes import run_matrix
from labs.kit.toys.words import brief, describe
from mini_engine.tests.soak import count


def python(code):
    code = f"import time\nfrom labs.kit.judge import guard\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_endless_loop_is_ended():
    with pytest.raises(TimeUp), deadline(0.05):
        while True:
            pass


def test_a_loop_that_swallows_everything_is_interrupted_again():
    raised = 0
    with deadline(0.05):
        while raised < 2:
            try:
                while True:
                    pass
            except BaseException as error:
                assert isinstance(error, TimeUp)
                raised += 1
    assert raised == 2


def test_a_clock_that_the_code_replaced_does_not_help_it(monkeypatch):
    with pytest.raises(TimeUp), deadline(0.05):
        monkeypatch.setattr(time, "process_time", lambda: 0)
        monkeypatch.setattr(time, "monotonic", lambda: 0)
        while True:
            pass


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="a sleep can be woken by a signal only")
@pytest.mark.parametrize("hang", [lambda: time.sleep(60), threading.Event().wait], ids=["sleep", "lock"])
@pytest.mark.parametrize("counted", [True, False], ids=["linux", "elsewhere"])
def test_waiting_is_ended_by_the_clock_and_called_waiting(monkeypatch, hang, counted):
    if not counted:
        monkeypatch.setattr(guard._Spent, "_starved", lambda self: None)
    began = time.monotonic()
    with pytest.raises(TimeUpWaiting) as ended, deadline(0.2):
        hang()
    assert 0.8 <= time.monotonic() - began < 30
    said = guard.late(ended.value, 0.2)
    assert said == "no answer within 0.8 s, and it waits without computing: a sleep, a lock, or input?"


def test_computing_now_and_then_buys_no_time(monkeypatch):
    monkeypatch.setattr(guard, "WAIT", 0.1)
    began = time.process_time()
    with pytest.raises(TimeUpWaiting), deadline(0.2):
        while True:
            compute(0.001)
            time.sleep(0.009)
    assert time.process_time() - began < 0.15


OWN, OTHERS = 0.0005, 0.1  # seconds between two looks: a loop's, and those in which others compute


@pytest.mark.parametrize(
    ("between", "ended", "after"),
    [
        ([OWN], TimeUp, 1),
        ([0.02], TimeUp, 1),
        ([*[OWN] * 4, OTHERS], TimeUpWaiting, 10),
        ([*[OWN] * 400, OTHERS], TimeUp, 1.5),
    ],
    ids=["loop", "loop-in-c", "hardly-any-processor", "busy-machine"],
)
def test_where_no_thread_can_watch_others_time_does_not_count(monkeypatch, between, ended, after):
    """A block with 1 s to compute, and 10 on the clock. That it goes on is reported each second."""
    now, beats = 100.0, []
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    own = {
        "_ends": [(1.0, now + 10, (TimeUp, TimeUpWaiting))],
        "_looked": now,
        "_passed": 0.0,
        "_worked": 0.0,
    }
    for name, value in (own | {"_over": False, "_look_again": now, "_beats": now + 1}).items():
        monkeypatch.setattr(clock, name, value)
    monkeypatch.setattr(clock, "beat", lambda: beats.append(now))
    with pytest.raises(TimeUp) as found:
        for seconds in itertools.cycle(between):
            now += seconds
            monkeypatch.setattr(clock, "_ticks", 63)
            clock._look((lambda: None).__code__)
    assert found.type is ended and now - 100 == pytest.approx(after, abs=0.15)
    assert now - beats[-1] < 1.2
    assert all(0.99 < later - earlier < 1.2 for earlier, later in itertools.pairwise([100.0, *beats]))


@pytest.mark.parametrize(("times_a_laptop", "factor"), [(0.5, 1), (1, 1), (4, 4)])
def test_a_slow_machine_has_longer_deadlines(monkeypatch, times_a_laptop, factor):
    monkeypatch.setattr(clock, "scale", None)
    monkeypatch.setattr(clock, "beat", None)
    monkeypatch.setattr(clock, "repeat", lambda *code, **times: [9.0, times_a_laptop * clock.LAPTOP, 8.0])
    clock.begin(0.5, print)
    assert (clock.scale, clock.beat) == (0.5 * factor, print)


@pytest.mark.parametrize(
    "counted", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["linux", "elsewhere"]
)
def test_a_busy_machine_costs_a_block_nothing(counted, spinning):
    """A block that computes in time is in time, even if it gets no processor for longer than it may wait."""
    code = (
        "import os\nguard.WAIT = 0.5\n"
        "if hasattr(os, 'sched_setaffinity'):\n    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        f"if not {counted}:\n    guard._Spent._starved = lambda self: None\n"
        "began = time.monotonic()\nend = time.process_time() + 0.2\n"
        "with guard.deadline(0.3):\n    while time.process_time() < end:\n        pass\n"
        "print(time.monotonic() - began)"
    )
    with spinning(4):
        ended = python(code)
    assert not ended.stderr and float(ended.stdout) > 0.2 + 2 * 0.5 * 0.3  # or the machine was not busy


@pytest.mark.soak
@pytest.mark.timeout(10_000)
def test_a_busy_machine_fails_no_right_solution(spinning):
    """All labs' tests pass, for all right solutions, at the same time and beside sixteen processes that
    compute without end."""
    labs = [*map(find_lab, lab_ids())]
    with spinning(16, everywhere=True), ThreadPoolExecutor(len(labs)) as pool:
        outcomes = [*pool.map(lambda lab: run_matrix(lab, right(lab)), labs)]
    for found in outcomes:
        assert not found.trouble and {*found.results} == {*right(found.lab)}
        results = [result for results in found.results.values() for result in results]
        assert [(r.test, r.said) for r in results if not r.passed] == []
        count("tests of right solutions on a busy machine", len(results))


def test_a_call_that_nothing_interrupts_ends_with_its_process():
    code = "from itertools import count\nguard.HELD = 0.3\nwith guard.deadline(0.05):\n    sum(count())"
    ended = python(code)  # for 0.5 s in all
    assert ended.returncode == 1
    assert 'File "<string>", line 6' in ended.stderr


def test_a_last_resort_is_called_off():
    """Nothing ends a process that was in time, not even long after; nor an outer block by an inner one."""
    block = "guard.HELD = 0.3\nwith guard.deadline(0.05):\n    pass\n"
    ended = python(f"{block}time.sleep(1)\nprint('alive')")
    assert (ended.returncode, ended.stdout) == (0, "alive\n")


def test_a_last_resort_is_for_what_holds_the_interpreter():
    """It is put off as long as other threads run: the block may compute, and wait, for longer."""
    block = "guard.HELD, guard.LOOK = -39.0, 0.1\nwith guard.deadline(10):\n    time.sleep(2)\n"
    ended = python(f"{block}print('alive')")
    assert (ended.returncode, ended.stdout) == (0, "alive\n")


@pytest.mark.parametrize("tracer", ["settrace", "setprofile"])
def test_a_deadline_ends_under_a_debugger_or_a_profiler(tracer):
    """A tracer sees every call in the block, in time or too late, and the code after it runs."""
    code = (
        f"import sys\nsys.{tracer}(lambda *seen: None)\n"
        "for _ in range(3):\n    with guard.deadline(5):\n        pass\n"
        "try:\n    with guard.deadline(0.05):\n        while True:\n            pass\n"
        "except guard.TimeUp:\n    print('ended')\n"
    )
    ended = python(code)
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr


def test_a_quick_block_is_left_alone_and_nothing_strikes_later():
    for _ in range(50):
        with deadline(0.02):
            pass
    compute(0.1)


def test_a_deadline_that_is_struck_as_it_begins_is_over(monkeypatch):
    @contextlib.contextmanager
    def struck(seconds):
        raise TimeUp
        yield lambda: None

    monkeypatch.setattr(guard, "_last_resort", struck)
    with pytest.raises(TimeUp), deadline(0.02):
        pass
    compute(0.6)  # it would strike again after half a second


def test_deadlines_nest():
    with deadline(5):
        with pytest.raises(TimeUp), deadline(0.05):
            while True:
                pass


class Mute(Exception):
    def __str__(self):
        raise ValueError("no")

    __repr__ = __str__


def test_an_error_without_or_with_endless_text_is_described_shortly():
    assert describe(Mute()) == "Mute: (Mute, which cannot be shown)"
    assert describe(ValueError("x" * 10**6)).endswith("x...")
    assert describe(ValueError("one\ntwo")) == "ValueError: one"
    assert describe(MemoryError()) == "MemoryError"
    assert brief([Mute()]) == "(list, which cannot be shown)"
    assert len(brief(list(range(10**6)))) == 100
    assert brief(10**5000) == "(int, which cannot be shown)"


def test_flood_is_ended_on_every_stream_and_a_line_is_not(capsys):
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        with pytest.raises(PrintFlood), limited_prints(silent=True):
            while True:
                print("still here", file=getattr(sys, name))
    with pytest.raises(PrintFlood), limited_prints():
        while True:
            print("still here")
    assert len(capsys.readouterr().out) <= FLOOD
    with limited_prints():
        print("hello")
    assert capsys.readouterr().out == "hello\n"
