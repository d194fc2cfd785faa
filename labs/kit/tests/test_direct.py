"""A test that records no run has a sentence too, on the first call that gives something else."""

from contextlib import suppress
from fractions import Fraction
from types import SimpleNamespace

import pytest

from labs.kit import make_request
from labs.kit.judge import direct, loading
from labs.kit.judge.manifest import find_lab
from mini_engine.request import SamplingParams


def said(lab_id, yours, test):
    """The sentence on a test, a function of a lab, of the reference with `yours` in it; "" without one."""
    lab, notes = find_lab(lab_id), (direct.Notes(), direct.Notes())
    reference = loading.load(lab_id, "solution")
    for part, own in zip((SimpleNamespace(**vars(reference) | yours), reference), notes, strict=True):
        with suppress(Exception):  # as a test that fails
            test(direct.Noting(part, lab, own))
    found = direct.sentence(*(own.calls for own in notes))
    return found.text if found else ""


def mistaken(lab_id, mistake_id, *names):
    """Some names of the file that makes a known mistake."""
    lab = find_lab(lab_id)
    module = loading.mistaken(lab, next(one for one in lab.mistakes if one.id == mistake_id))
    return {name: getattr(module, name) for name in names}


def test_a_function_is_shown_with_what_it_returns():
    wrong = mistaken("lab-02", "threshold-off-by-one", "clamp")
    assert said("lab-02", wrong, lambda lab: lab.clamp(100, 64, threshold=16)) == (
        "Your clamp(100, 64, threshold=16) returns 15; the reference returns 16."
    )
    assert said("lab-02", {}, lambda lab: lab.clamp(100, 64, 16)) == ""


def test_what_is_long_is_shown_at_the_first_place_that_differs():
    def test(lab):
        lab.apply_top_p([2.0, 1.0] + [0.0] * 40, 0.99)

    wrong = {"apply_top_p": lambda logits, top_p: [*logits[:30], 7.0, *logits[31:]]}
    assert said("lab-08", wrong, test).endswith(" returns 7 at place 30; the reference returns 0.")


def test_fractions_are_shown_as_numbers():
    half = Fraction(1, 2)
    wrong = {"residual": lambda p, q: [1, 0]}
    assert said("lab-10", wrong, lambda lab: lab.residual([half, half], [half, half])) == (
        "Your residual([0.5, 0.5], [0.5, 0.5]) returns [1, 0]; the reference returns [0.5, 0.5]."
    )


def test_settings_are_shown_by_what_is_set():
    def test(lab):
        lab.apply_penalties([4.0], [0, 0], [], SamplingParams(repetition_penalty=2.0))

    wrong = mistaken("lab-08", "repetition-for-each-time", "apply_penalties")
    assert said("lab-08", wrong, test) == (
        "Your apply_penalties([4], [0, 0], [], SamplingParams(repetition_penalty=2.0)) returns [1]; "
        "the reference returns [2]."
    )


@pytest.mark.parametrize(
    ("yours", "words"),
    [
        (
            {"clamp": lambda *_: 1 / 0},
            "Your clamp(8, 4, 0) raises ZeroDivisionError; the reference returns 4.",
        ),
        ({"clamp": lambda *_: None}, "Your clamp(8, 4, 0) returns None; the reference returns 4."),
    ],
)
def test_an_error_is_something_given(yours, words):
    assert said("lab-02", yours, lambda lab: lab.clamp(8, 4, 0)) == words


def test_a_method_is_shown_with_what_it_leaves_behind():
    """Each field of a request is noted, and lists of requests; inner calls are not."""

    def test(lab):
        kv = SimpleNamespace(num_free_blocks=9, num_blocks=9, block_size=4, free=lambda request: None)
        scheduler = lab.Scheduler(kv, max_num_batched_tokens=8, max_num_seqs=4)
        scheduler.add(make_request("a", 5))
        request = scheduler.waiting.pop()
        request.num_computed_tokens = 3
        scheduler.running.append(request)
        scheduler.preempt(request)

    keeps = mistaken("lab-03", "progress-kept", "Scheduler")
    words = "After your preempt(a), the num_computed_tokens of a is 3; in the reference 0."
    assert said("lab-03", keeps, test) == words

    class Loses(loading.load("lab-03", "solution").Scheduler):
        def preempt(self, request):
            super().preempt(request)
            self.waiting.pop()

    words = "After your preempt(a), waiting is []; in the reference [a]."
    assert said("lab-03", {"Scheduler": Loses}, test) == words


def test_an_object_among_the_arguments_is_named_by_its_kind():
    kv = SimpleNamespace()
    words = said("lab-02", {"clamp": lambda *_: None}, lambda lab: lab.clamp(kv, 4, 0))
    assert words.startswith("Your clamp(the SimpleNamespace, 4, 0) returns;")


def test_any_block_and_any_name_will_do():
    """Another order of the free blocks and another hash are no difference; too few of them are one."""

    def test(lab):
        kv = lab.BlockManager(8, 4, watermark=0)
        kv.admit(make_request("a", 9))
        return kv.block_table(make_request("a", 1))

    class Other(loading.load("lab-05", "solution").BlockManager):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._free.reverse()

    assert said("lab-05", {"BlockManager": Other}, test) == ""
    few = mistaken("lab-05", "rounded-down", "BlockManager")
    words = "Your block_table(a) returns a list of 2; the reference returns a list of 3."
    assert said("lab-05", few, test) == words

    def names(lab):
        lab.hash_block(b"", (1, 23))
        lab.hash_block(b"", (12, 3))

    assert said("lab-06", {"hash_block": lambda parent, ids: repr((parent, ids)).encode()}, names) == ""
    joined = mistaken("lab-06", "seams-lost", "hash_block")
    assert "returns what hash_block(the bytes, [1, 23]) has returned" in said("lab-06", joined, names)


def test_calls_that_are_others_say_nothing():
    """The test went another way for a reason that no call shows."""

    def test(lab):
        lab.clamp(8, 4, 0 if lab.EXTRA else 1)

    reference = loading.load("lab-02", "solution")
    calls = []
    for extra in (True, False):
        notes = direct.Notes()
        test(direct.Noting(SimpleNamespace(**vars(reference), EXTRA=extra), find_lab("lab-02"), notes))
        calls.append(notes.calls)
    assert direct.sentence(*calls) is None
