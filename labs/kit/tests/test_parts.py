"""`python -m labs demo`: the learner's parts run in the real engine, and end in words when they fail."""

import random

import pytest
import torch

from labs.kit.judge import loading, matrix
from labs.kit.judge.manifest import find_lab, lab_ids, replace_body
from labs.kit.judge.task_status import Result
from labs.kit.learner import parts, shapes, texts
from labs.kit.learner.parts import LearnerParts, why_unused
from labs.kit.learner.progress import Progress
from labs.kit.tests import marks
from labs.kit.tests.files import solution
from mini_engine.engine import Engine
from mini_engine.loading.checkpoint import load
from mini_engine.model import CausalLM, ModelConfig
from mini_engine.request import SamplingParams
from mini_engine.show.demo_report import Answer

CONFIG = ModelConfig("qwen3", 50, 32, 48, 2, 4, 2, 8, 128, tie_word_embeddings=True, qk_norm=True)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return CausalLM(CONFIG).double().eval()


def serve(model, check=None, **engine_args) -> list[list[int]]:
    """Ten requests through a pool so small that some are preempted; their tokens."""
    rng = random.Random(1)
    settings = {"policy": "priority", "max_num_batched_tokens": 16, "max_num_seqs": 4, "num_blocks": 14}
    engine = Engine(model, block_size=4, watermark=0, **settings, **{"record": True} | engine_args)
    tokens = {}
    for _ in range(10):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 24))]
        sampling = SamplingParams(temperature=0, max_tokens=rng.randint(1, 20))
        tokens[engine.add_request(prompt, sampling, priority=rng.randint(0, 2))] = []
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
        if check:
            check(engine)
    assert any(e.type == "PREEMPTED" for step in engine.trace.steps for e in step.events)
    return list(tokens.values())


ALL = ",".join(lab_ids())


@pytest.mark.parametrize("labs", marks.some([*lab_ids(), "lab-01,lab-02,lab-03", ALL], "lab-02", ALL))
def test_solutions_give_the_engine_s_own_tokens(model, labs):
    learner = LearnerParts.from_labs(labs, impl="solution")
    assert serve(model, learner.check, **learner.engine_args) == serve(model)


TABLES = {
    "lab-01,lab-05,lab-06": {"schedule_step": "lab-01", "BlockManager": "lab-06", "Scheduler": ""},
    "lab-02,lab-04": {"attend_backend": "lab-04", "next_chunk": ""},  # lab-04 calls the engine's
    "2,4,5": {"attend_backend": "lab-05", "next_chunk": "lab-02"},
}


@pytest.mark.parametrize("labs", TABLES)
def test_the_table_names_the_lab_of_each_part(labs):
    """The later lab's part is used, and none is named that is not called."""
    table = dict(LearnerParts.from_labs(labs, impl="solution").table())
    for part, lab_id in TABLES[labs].items():
        assert table[part] == (f"{lab_id}, yours" if lab_id else "the engine's own")


def test_what_is_not_used_and_why():
    def unused(labs):
        return LearnerParts.from_labs(labs, impl="solution").unused

    assert unused("lab-01,lab-03") == []
    assert unused("lab-05,lab-06") == ["lab-05's BlockManager: lab-06's is used instead"]
    assert unused("lab-02,lab-04") == [
        "lab-02's next_chunk: lab-04's fused_step calls the engine's",
        "lab-02's prefill_budget: no part of this engine calls it",
    ]


def test_why_a_lab_is_not_used():
    lab = find_lab("lab-02")
    names = [task.name for task in lab.tasks]
    results = [Result(test, passed=test not in lab.tasks[1].tests) for test in lab.tests]
    failed = [result.test for result in results if not result.passed]
    assert why_unused(Progress(lab, [], unwritten=names, started=False)) == "lab-02: not written yet"
    one = "lab-02: prefill_budget is not written yet"
    assert why_unused(Progress(lab, results, unwritten=names[2:])) == one
    more = "lab-02: next_chunk and 1 more of its tasks are not written yet"
    assert why_unused(Progress(lab, results, unwritten=names[1:])) == more
    first = Progress(lab, results).most_informative.function
    assert why_unused(Progress(lab, results)) == f"lab-02: {first} fails, and {len(failed) - 1} more tests"
    problem = "lab-02: starter.py does not parse, line 3: invalid syntax"
    assert why_unused(Progress(lab, [], unwritten=names, problem=problem)) == problem


def broken(monkeypatch, lab_id: str, task: str, body: str) -> LearnerParts:
    """The parts of a lab whose solution has another body in one place, as a starter.py would have it."""
    lab = find_lab(lab_id)
    source = replace_body(solution(lab_id), task, body)
    module = loading.execute(source, f"broken_{lab_id}".replace("-", "_"), lab.file("starter.py"))
    monkeypatch.setattr("labs.kit.learner.parts.namespace", lambda lab_id, impl: module)
    return LearnerParts.from_labs(lab_id)


def why(model, learner) -> str:
    with pytest.raises(BaseException) as raised:  # noqa: B017 (whatever the part raises is explained)
        serve(model, learner.check, **learner.engine_args)
    return str(learner.explain(raised.value, 3))


def test_a_part_that_raises_is_named_with_line_step_and_request(model, monkeypatch):
    learner = broken(monkeypatch, "lab-03", "Scheduler.preempt", "return request.no_such_thing")
    found = why(model, learner)
    assert "lab-03: preempt stopped the run in step 3, with request r" in found
    assert "starter.py, line" in found and "AttributeError" in found


def test_a_part_that_breaks_an_invariant_is_named(model, monkeypatch):
    body = """
        scheduled = {}
        while waiting and len(running) < max_num_seqs and kv.admit(waiting.peek()):
            running.append(waiting.pop())
            running[-1].status = RequestStatus.RUNNING
        for request in running:
            if request.num_new_tokens and kv.allocate(request, request.num_new_tokens):
                scheduled[request.request_id] = request.num_new_tokens
        return scheduled
    """
    found = why(model, broken(monkeypatch, "lab-01", "schedule_step", body))
    assert "lab-01" in found and "tokens scheduled, but the limit is 16" in found


TROUBLES = {
    "mute": ("class E(Exception):\n    __str__ = None\nraise E", "E: (E, which cannot be shown)"),
    "flood": ("while True:\n    print('tick')", "PrintFlood: more than 20000 characters were printed"),
    "long": ("return list(range(10**6))", "the schedule must be a dict {request_id: num_tokens}, not [0, 1,"),
    "endless": ("while True:\n    pass", "no answer within 0.5 s"),
}


@pytest.mark.parametrize(("body", "words"), TROUBLES.values(), ids=TROUBLES)
def test_whatever_it_raises_or_prints_is_one_line(model, monkeypatch, capsys, body, words):
    monkeypatch.setattr("labs.kit.learner.parts.SECONDS_A_STEP", 0.5)
    found = why(model, broken(monkeypatch, "lab-01", "schedule_step", body))
    assert words in found and len(found) < 300
    assert len(capsys.readouterr().out) <= 20_000


# ------------------------------------------------------------------- beside the engine's own answers


@pytest.fixture(scope="module")
def plays():
    return load("shakespeare")


@pytest.fixture(scope="module")
def expected(plays):
    return texts.answered(None, *plays, None)


def test_the_demo_has_all_that_a_part_may_do_wrong_with_a_text(expected):
    assert [answer.finish_reason for answer in expected.values()] == [
        *["length"] * 3, "stop", *["length"] * 4, "abort"
    ]  # fmt: skip
    assert "" in expected["r3"].pieces, "text is held back that might be a stop string"


@pytest.mark.parametrize(
    ("task", "body", "words"),
    [
        pytest.param(
            *("OutputText.append", "self.text += text", ["r3 ", "from token 47 (character 46) on"]),
            marks=pytest.mark.soak,
        ),
        (
            "OutputText.take",
            "given = self.text[self.num_given :]\nself.num_given += len(given)\nreturn given",
            ["r6 ", "the text is the same, but token 1 gives out '\\n' instead of ''"],
        ),
        (
            "Stream.__next__",
            """
            if self.closed:
                raise StopIteration
            while not self.inbox:
                self.engine.step()
            delta = self.inbox.pop()
            if delta.finish_reason:
                self.close()
            return delta
            """,
            ["r2 ", "from token 2 (character 2) on", "yours: ", "the engine's: won.\u21b5\u21b5HAMLET"],
        ),
        pytest.param(
            *("Stream.close", "self.closed = True\nself.unsubscribe()"),
            ["r8 ", "the text is the same, but the request ends by 'length' instead of 'abort'"],
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_wrong_text_or_stream_shows(monkeypatch, plays, expected, task, body, words):
    learner = broken(monkeypatch, "lab-07", task, body)
    departure = texts.first_departure(texts.answered(learner, *plays, None), expected)
    lines = departure.lines()
    assert [word for word in words if word not in "\n".join(lines)] == [] and len(lines) <= 4, lines


def test_a_stream_that_does_not_end_is_named(monkeypatch, plays):
    body = "while not self.inbox:\n    self.engine.step()\nreturn self.inbox.popleft()"
    learner = broken(monkeypatch, "lab-07", "Stream.__next__", body)
    with pytest.raises(Exception) as raised:
        texts.answered(learner, *plays, None)
    assert "lab-07: __next__ stopped the run" in str(learner.explain(raised.value, 3))


def test_right_parts_give_the_engine_s_own_answers(monkeypatch, plays, expected):
    learner = LearnerParts.from_labs(ALL, impl="solution")
    answers = texts.answered(learner, *plays, None)
    monkeypatch.setattr(texts, "answered", lambda *_: expected)
    right, lines = texts.compared(learner, answers, *plays)
    assert (right, lines) == (True, ["All answers are those of the engine's own parts."])


@pytest.mark.soak
def test_the_lab_that_does_it_by_itself_is_named(monkeypatch, plays):
    body = "return mini_engine.attention.paged_attention(q * 2, k_cache, v_cache, batch)"
    lab = find_lab("lab-05")
    source = "import mini_engine.attention\n" + solution("lab-05")
    wrong = loading.execute(replace_body(source, "paged_attention", body), "wrong", lab.file("starter.py"))
    real = loading.namespace
    monkeypatch.setattr(
        "labs.kit.learner.parts.namespace",
        lambda lab_id, impl: wrong if lab_id == "lab-05" else real(lab_id, "solution"),
    )
    learner = LearnerParts.from_labs("lab-02,lab-05")
    right, lines = texts.compared(learner, texts.answered(learner, *plays, 0), *plays, temperature=0)
    assert not right and len(lines) <= 6
    assert lines[-2:] == ["The parts of lab-05 alone cause it. Test them:", "  python -m labs test lab-05"]


def test_rounding_is_no_fault_of_a_part(monkeypatch, plays, expected):
    monkeypatch.setattr(texts, "answered", lambda *_: expected)  # in float64 too
    learner = LearnerParts.from_labs("lab-05", impl="solution")
    other = expected | {"r0": Answer("O Romeo, ", ["x", *expected["r0"].pieces[1:]], finish_reason="length")}
    right, lines = texts.compared(learner, other, *plays)
    assert right and "from token 1 (character 1) on" in lines[0]
    assert lines[-1] == "In float64 all answers are the same: the difference is rounding in torch.float32."


@pytest.mark.parametrize("wrong", marks.some(["", "a-star-once"], "a-star-once"))
def test_the_demo_writes_texts_of_a_shape_with_the_learner_s_grammar(model, wrong, monkeypatch):
    """Each prompt's text matches its pattern; a wrong grammar is reported, with what should be there."""
    if wrong:
        module, own = matrix.implementation("lab-09", f"mistake:{wrong}"), parts.namespace
        monkeypatch.setattr(
            parts, "namespace", lambda lab, impl: module if lab == "lab-09" else own(lab, impl)
        )
    loaded, tokenizer = load("shakespeare", "float32", "cpu")
    right, lines = shapes.compared(LearnerParts.from_labs("lab-09", impl="solution"), loaded, tokenizer)
    assert [line.strip() for line in lines[1::2]] == [pattern for _, pattern in shapes.PLAYS]
    assert right == ("DIFFERS" not in "".join(lines)) == (not wrong)
