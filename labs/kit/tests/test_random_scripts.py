"""A script that departs is found, cut to the calls that it needs, and shown beside the expected run."""

import json
import random
import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest

from labs.kit.author.check import alternatives, imports
from labs.kit.judge import compare, loading, random_scripts
from labs.kit.judge.guard import TimeUp
from labs.kit.judge.isolate import tasks_of
from labs.kit.judge.manifest import find_lab, lab_ids
from labs.kit.judge.matrix import RANDOM_SCRIPTS, implementation, result_of
from labs.kit.judge.task_status import TaskStatus, fingerprint
from labs.kit.toys.driver import EXPECTED, RUNS
from labs.kit.toys.plays import Counted, Unnamed, in_runs, naming, steps_of
from labs.kit.toys.plays import Play as Base
from labs.kit.toys.requests import make_request
from labs.kit.toys.scripts import Skip
from labs.kit.toys.words import kind
from mini_engine.tests.soak import SOAK, count


class Counter:
    """A part to play on: it counts, and refuses what is below 0."""

    def __init__(self):
        self.count = 0

    def add(self, n):
        if n < 0:
            raise ValueError("below 0")
        self.count += n
        return self.count

    def reset(self):
        self.count = 0


class Play:
    def __init__(self, part, config):
        self.counter = part.Counter()

    def add(self, n):
        return self.counter.add(n)

    def reset(self):
        if not self.counter.count:
            raise Skip
        self.counter.reset()

    def seen(self):
        return {"count": self.counter.count}


def draw(rng):
    calls = [["reset"] if rng.random() < 0.2 else ["add", rng.randint(-2, 9)] for _ in range(30)]
    return {"config": {"kind": "counter"}, "calls": calls}


@pytest.fixture
def tell(monkeypatch):
    """Return what `judge` says of a Counter with some methods of its own; "" if nothing."""
    files = {
        "random_scripts": SimpleNamespace(Play=Play, draw=draw, SCRIPTS=5),
        "oracle": SimpleNamespace(Counter=Counter),
    }
    monkeypatch.setattr(loading, "load", lambda lab_id, name: files[name])
    monkeypatch.setattr(random_scripts, "quick", False)
    for name in ("drawn", "expected"):
        monkeypatch.setattr(random_scripts, name, cache(getattr(random_scripts, name).__wrapped__))
    return lambda **methods: said(part(**methods))


def part(**methods):
    return SimpleNamespace(Counter=type("Mine", (Counter,), methods))


def said(mine) -> str:
    RUNS.clear()
    EXPECTED.clear()
    try:
        random_scripts.judge("a lab", mine)
    except AssertionError as error:
        return str(error)
    return ""


def test_a_script_is_cut_to_the_calls_that_it_needs(tell):
    """Counting goes wrong after a reset only: an addition, a reset, an addition are left of thirty calls."""

    def add(self, n):
        return Counter.add(self, n) + getattr(self, "bonus", 0)

    text = tell(add=add, reset=lambda self: setattr(self, "count", 0) or setattr(self, "bonus", 1))
    calls = [line.strip().partition("(")[0] for line in text.splitlines() if line.startswith("    ")]
    assert calls == ["kind = counter", "add", "reset", "add"] and tell() == ""
    assert text.splitlines()[-1].startswith("returned: ") and ", but should be " in text


def test_yours_and_what_should_have_been_are_there_to_be_played(tell):
    tell(reset=lambda self: None)
    ((_, yours),), ((_, model),) = RUNS, EXPECTED
    assert [step.op[0] for step in yours.steps] == ["add", "reset"] == [step.op[0] for step in model.steps]
    assert model.steps[-1].observed == {"count": 0} != yours.steps[-1].observed


def test_the_state_after_an_error_is_looked_at(tell):
    def add(self, n):
        self.count += n
        if n < 0:
            raise ValueError("below 0")
        return self.count

    text = tell(add=add)
    assert "raises ValueError" in text and "count: " in text.splitlines()[-1]


def test_an_error_of_another_kind_departs_and_an_error_too_many_is_told(tell):
    def add(self, n):
        return Counter.add(self, n) if n >= 0 else {}["no"]

    assert "raised: 'KeyError', but should be 'ValueError'" in tell(add=add)
    text = tell(reset=lambda self: 1 // 0)
    assert text.splitlines()[-1] == "raised: ZeroDivisionError: integer division or modulo by zero"


def test_what_is_not_written_is_no_departure(tell):
    def reset(self):
        raise NotImplementedError("lab-01: reset is not written yet")

    with pytest.raises(NotImplementedError):
        tell(reset=reset)


def test_a_fingerprint_is_equal_for_what_no_script_distinguishes(tell):
    def prints(mine):
        return random_scripts.fingerprint("a lab", mine)

    later, never = part(reset=lambda self: setattr(self, "count", 1)), part(reset=lambda self: None)
    again = part(reset=lambda self: setattr(self, "count", 2 - 1))
    assert prints(later) == prints(again) != prints(never) != prints(part())


def test_a_script_that_does_not_end_ends_its_fingerprint(monkeypatch, tell):
    def reset(self):
        while True:
            pass

    monkeypatch.setattr(random_scripts, "SECONDS", 0.1)
    with pytest.raises(TimeUp):
        random_scripts.fingerprint("a lab", part(reset=reset))


def test_same():
    assert compare.same(0.1 + 0.2, 0.3) and compare.same({"a": [1]}, {"a": [1]})
    unlike = [([1.0, 2.0], [1.0, 2.0001]), (1, 1.0), (True, 1), ({"a": 1}, {"a": 1, "b": 1}), ([1, 2], [1])]
    assert not [pair for pair in unlike if compare.same(*pair)]


def test_of_floats_a_fingerprint_counts_which_rows_are_right():
    """Their last digits differ by platform."""
    model = [[0.1, 0.2], [0.3, 0.4]]
    wrong, other = [[0.1, 0.2], [7.0, 7.0]], [[0.1, 0.2 + 1e-12], [8.0, 8.0]]
    assert random_scripts.canonical(wrong, model) == random_scripts.canonical(other, model) == [True, False]
    assert random_scripts.canonical([1, 2], [1, 3]) == [1, 2], "whole numbers are what they are"


@pytest.mark.parametrize("lab_id", lab_ids())
def test_scripts_are_drawn_alike_and_differ_by_seed(lab_id):
    drawing = loading.load(lab_id, "random_scripts").draw
    one, again, other = (drawing(random.Random(f"{lab_id} {seed}")) for seed in (1, 1, 2))
    assert one == again != other
    assert json.loads(random_scripts.text(one)) == one, "a script is JSON"


@pytest.mark.parametrize("lab_id", lab_ids())
def test_the_model_stands_on_its_own_feet(lab_id):
    """It shares neither code with the solution nor with the engine's twins."""
    lab = find_lab(lab_id)
    source = lab.file("oracle.py").read_text("utf-8")
    twins = {task.engine.replace(":", ".") for task in lab.tasks}
    assert not imports(source) & twins and "solution" not in source


SEEDS = 3000 if SOAK else 10


@pytest.mark.parametrize("lab_id", lab_ids())
def test_right_ones_pass_scripts_that_the_lab_does_not_play(lab_id):
    """The oracle agrees with the solution, the engine's parts and the alternatives, on seeds of its own."""
    names = ["solution", "engine", *alternatives(find_lab(lab_id))]
    parts = [implementation(lab_id, name) for name in names]
    for number in range(SEEDS):
        script = random_scripts.drawn(lab_id, seed := f"soak {number}")
        expected = random_scripts.expected(lab_id, seed)
        for name, part in zip(names, parts, strict=True):
            played = random_scripts.run(lab_id, part, script)
            assert random_scripts.departure(played, expected) is None, (name, seed)
    count("random scripts, each played by all right solutions", SEEDS)


def test_a_play_notes_what_is_changed_though_it_may_only_be_read():
    play = Base(None)
    request, tokens, result = make_request("r", 3), [1, 2], {"a": 1}
    with play.only_reading(request=request, tokens=tokens):
        request.output_token_ids.append(7)
    play.lend("the first result", result)
    assert play.all_changed() == ["request.output_token_ids"] and play.all_changed() == []
    result["a"] = 2
    assert play.all_changed() == ["the first result"]
    with pytest.raises(Skip):
        play.known("r")


def test_an_error_must_name_its_request():
    with pytest.raises(Unnamed, match="does not name r7: no room"), naming("r7"):
        raise ValueError("no room")
    with pytest.raises(ValueError, match="^no room for r7$"), naming("r7"):
        raise ValueError("no room for r7")


def test_work_is_counted_without_a_clock():
    before = Counted.comparisons
    assert sorted(map(Counted, (3, 1, 2))) == [1, 2, 3] and Counted.comparisons > before
    assert steps_of(lambda: [n for n in range(100) if n]) > steps_of(lambda: None)
    assert in_runs([4, 5, 6, 1, 9, 10]) == "4..6, 1, 9..10"


def test_an_error_has_one_name_in_every_python():
    """Python 3.13 renamed re.error, and the fingerprint of a mistake is one for all."""
    with pytest.raises(re.error) as caught:
        re.search("?", "")
    assert kind(caught.value) == "error" and kind(KeyError("a")) == "KeyError"
    renamed = type("PatternError", (re.error,), {})
    assert kind(renamed("?")) == "error"


def test_a_failure_that_takes_long_to_name_is_no_endless_loop(monkeypatch):
    """It has no fingerprint then, so it gets no name; what is said of it stays true."""

    def run_out_of_time(*given):
        raise TimeUp

    monkeypatch.setattr(random_scripts, "fingerprint", run_out_of_time)
    lab = find_lab("lab-01")
    call = pytest.CallInfo.from_call(lambda: json.loads("?"), "call")
    item = SimpleNamespace(name=RANDOM_SCRIPTS, funcargs={"lab": None})
    result = result_of(item, lab, call, RANDOM_SCRIPTS)
    assert result.said.startswith("JSONDecodeError") and TaskStatus(lab, [result]).endless is None
    task = replace(lab.tasks[0], tests=(RANDOM_SCRIPTS,))
    assert fingerprint(task, [result]) == "" != fingerprint(task, [replace(result, runs="")])


PLAIN = {task.name for task in find_lab("lab-08").without_torch.tasks}
MISTAKES = [
    one.id for one in find_lab("lab-08").mistakes if PLAIN.issuperset(tasks_of(find_lab("lab-08"), one))
]


@pytest.mark.parametrize(
    "mistake_id", MISTAKES if SOAK else ["negative-logits-divided", "always-the-first-number"]
)
def test_a_mistake_is_the_same_where_torch_is_missing(monkeypatch, mistake_id):
    """A page names the mistake by what its scripts do, although a step is computed without torch there."""
    part = implementation("lab-08", f"mistake:{mistake_id}")
    with_torch = random_scripts.fingerprint("lab-08", part)
    monkeypatch.setattr(loading.load("lab-08", "random_scripts"), "find_spec", lambda name: None)
    assert random_scripts.fingerprint("lab-08", part) == with_torch
    count("mistakes compared without torch", 1)
