"""`python -m labs demo`: the learner's parts run in the real engine, and end in words when they fail."""

import random

import pytest
import torch
from typer.testing import CliRunner

from labs.kit.judge import loading
from labs.kit.judge.manifest import find_lab, lab_ids, replace_body
from labs.kit.learner.commands import app
from labs.kit.learner.parts import LearnerParts
from mini_engine.engine import Engine
from mini_engine.model import CausalLM, ModelConfig
from mini_engine.request import SamplingParams

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


@pytest.mark.parametrize("labs", [*lab_ids(), "lab-01,lab-02,lab-03", ",".join(lab_ids())])
def test_solutions_give_the_engine_s_own_tokens(model, labs):
    learner = LearnerParts.from_labs(labs, impl="solution")
    assert serve(model, learner.check, **learner.engine_args) == serve(model)


def test_the_table_says_whose_each_part_is():
    learner = LearnerParts.from_labs("lab-01,lab-05,lab-06", impl="solution")
    whose = dict(learner.table())
    assert whose["schedule_step"] == "lab-01, yours"
    assert whose["BlockManager"] == "lab-06, yours", "the later lab wins"
    assert whose["Scheduler"] == "the engine's own"


def test_the_table_names_no_part_that_nothing_calls():
    """lab-04's fused_step cuts with the engine's next_chunk, whoever has written lab-02."""
    learner = LearnerParts.from_labs("lab-02,lab-04", impl="solution")
    whose = dict(learner.table())
    assert whose["attend_backend"] == "lab-04, yours"
    assert whose["next_chunk"] == "the engine's own"
    assert dict(LearnerParts.from_labs("2,4,5", impl="solution").table())["next_chunk"] == "lab-02, yours"


def broken(monkeypatch, lab_id: str, task: str, body: str) -> LearnerParts:
    """The parts of a lab whose solution has another body in one place, as a starter.py would have it."""
    lab = find_lab(lab_id)
    source = replace_body(lab.file("solution.py").read_text(), task, body)
    module = loading.execute(source, f"broken_{lab_id}".replace("-", "_"), lab.file("starter.py"))
    monkeypatch.setattr("labs.kit.learner.parts.namespace", lambda lab_id, impl: module)
    return LearnerParts.from_labs(lab_id)


def why(model, learner) -> str:
    with pytest.raises(BaseException) as raised:  # noqa: B017 (whatever the part raises is explained)
        serve(model, learner.check, **learner.engine_args)
    return str(learner.explain(raised.value, 3))


def test_a_part_that_raises_is_named_with_line_step_and_request(model, monkeypatch):
    learner = broken(monkeypatch, "lab-03", "Scheduler.preempt", "return request.no_such_thing")
    told = why(model, learner)
    assert "lab-03: preempt stopped the run in step 3, with request r" in told
    assert "starter.py, line" in told and "AttributeError" in told


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
    told = why(model, broken(monkeypatch, "lab-01", "schedule_step", body))
    assert "lab-01" in told and "tokens scheduled, but the limit is 16" in told


def test_an_endless_loop_ends(model, monkeypatch):
    monkeypatch.setattr("labs.kit.learner.parts.SECONDS_A_STEP", 0.5)
    learner = broken(monkeypatch, "lab-01", "schedule_step", "while True:\n    pass")
    with pytest.raises(BaseException) as raised:
        serve(model, **learner.engine_args)
    told = str(learner.explain(raised.value, 0))
    assert "lab-01: schedule_step stopped the run" in told and "no answer within 0.5 s" in told


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("class E(Exception):\n    __str__ = None\nraise E", "E: (E, whose text cannot be had)"),
        ("while True:\n    print('tick')", "PrintFlood: more than 20000 characters were printed"),
        ("import os\nos._exit(0)", "SystemExit: os._exit(0), which would end the whole run"),
        ("return list(range(10**6))", "the schedule must be a dict {request_id: num_tokens}, not [0, 1,"),
    ],
    ids=["mute", "flood", "exit", "long"],
)
def test_whatever_it_raises_or_prints_is_one_line(model, monkeypatch, capsys, body, words):
    told = why(model, broken(monkeypatch, "lab-01", "schedule_step", body))
    assert words in told and len(told) < 300
    assert len(capsys.readouterr().out) <= 20_000


def test_an_unwritten_starter_is_told_kindly():
    lab = find_lab("lab-01")
    if "not written yet" not in lab.file("starter.py").read_text():
        pytest.skip("lab-01's starter.py has been written: well done")
    result = CliRunner().invoke(app, ["demo", "lab-01"])
    assert result.exit_code == 1
    loading, *said = result.stderr.splitlines()
    assert loading == "loading shakespeare and lab-01"
    assert said == ["lab-01: schedule_step is not written yet"]


@pytest.mark.parametrize(
    ("labs", "message"), [("lab-77", "there is no lab 'lab-77'"), ("", "there is no lab")]
)
def test_an_unknown_lab_is_refused(labs, message):
    with pytest.raises(ValueError, match=message):
        LearnerParts.from_labs(labs)
