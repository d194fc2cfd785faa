"""Tests of the engine's loop: one step, the time between two steps, whole runs; then what a reader
gets to see, a stream and its text."""

import re
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import tokenizers

from labs.kit import assert_drained, judge_random_scripts, load
from labs.kit.judge.manifest import find_lab
from labs.kit.learner.parts import LearnerParts
from labs.kit.tensor_toys import engines
from mini_engine.parts import NoWorkError, Parts
from mini_engine.scheduler import schedule_step
from mini_engine.text.tokenizer import Tokenizer
from mini_engine.trace import first_difference

scenarios = load("lab-07", "scenarios")
SCENARIOS = {scenario["name"]: scenario for scenario in scenarios.SCENARIOS}


def request(name, prompt, max_tokens=4, **more):
    return {"id": name, "prompt": prompt, "max_tokens": max_tokens, **more}


def engine_with(lab, *requests, **config):
    """An engine around the lab's step, with these requests waiting."""
    engine = scenarios.make_engine(lab.step, **config)
    for entry in requests:
        engines.add(engine, entry)
    return engine


def tokens_of(deltas):
    """Deltas as {request_id: [tokens]}, in their order."""
    return {delta.request_id: delta.token_ids for delta in deltas}


def turns(engine, most=60):
    """The Deltas of each step, until no request is left."""
    for _ in range(most):
        if not engine.has_work:
            return
        yield engine.step()
    raise AssertionError(f"no end after {most} steps; left are {list(engine.requests)}")


def drain(engine):
    """All tokens until no request is left, as {request_id: tokens}."""
    said = {}
    for deltas in turns(engine):
        for delta in deltas:
            said.setdefault(delta.request_id, []).extend(delta.token_ids)
    return said


class Forwards:
    """Counts how often the model is called inside the block."""

    def __init__(self, name="tiny"):
        self.model, self.count = engines.model(name), 0

    def __enter__(self):
        self.hook = self.model.register_forward_hook(lambda *_: setattr(self, "count", self.count + 1))
        return self

    def __exit__(self, *_):
        self.hook.remove()


# ---------------------------------------------------------------------------------------- one step


def test_nothing_to_do_has_a_name(lab):
    """A step without any request raises NoWorkError, before the first request and after the last."""
    engine = engine_with(lab)
    with pytest.raises(NoWorkError):
        engine.step()
    engines.add(engine, request("A", 5, 2))
    drain(engine)
    with pytest.raises(NoWorkError):
        engine.step()


def test_a_waiting_request_is_work(lab):
    """With nothing running and one request waiting, step admits it, computes, and gives its first token."""
    engine = engine_with(lab, request("A", 5))
    assert tokens_of(engine.step()) == {"A": engines.alone(request("A", 5))[:1]}
    assert [r.request_id for r in engine.scheduler.running] == ["A"]


def test_an_empty_schedule_is_an_error_in_words(lab):
    """Work, but nothing scheduled, is a scheduler's bug: a RuntimeError that counts the requests left."""
    engine = scenarios.make_engine(lab.step, learner=only(schedule_step=lambda *_, **__: {}))
    engines.add(engine, request("A", 5))
    engines.add(engine, request("B", 5))
    with Forwards() as forwards, pytest.raises(RuntimeError) as caught:
        engine.step()
    assert not isinstance(caught.value, NoWorkError)
    for count, word in ((2, "waiting"), (0, "running")):
        said = re.search(rf"{count}\D*{word}|{word}\D*{count}", str(caught.value)) is not None
        assert said, f"it should say {count} {word}, and says {str(caught.value)!r}"
    assert forwards.count == 0


def test_one_forward_a_step(lab):
    """Two decodes, a prompt that ends and one that is cut: the model is called once, in every step."""
    engine = engine_with(lab, request("A", 4, 9), request("B", 3, 9), max_num_batched_tokens=16)
    engine.step()
    engines.add(engine, request("C", 6))
    engines.add(engine, request("D", 30))
    calls = []
    for _ in range(8):
        with Forwards() as forwards:
            engine.step()
        calls.append(forwards.count)
    assert calls == [1] * 8


def test_one_decision_a_step(lab):
    """The scheduler is asked once a step: a second answer would be to another question."""
    asked = []

    def counting(*args, **kwargs):
        asked.append(1)
        return schedule_step(*args, **kwargs)

    engine = scenarios.make_engine(lab.step, learner=only(schedule_step=counting))
    engines.add(engine, request("A", 20, 3))
    counts = []
    for _ in range(4):
        asked.clear()
        engine.step()
        counts.append(len(asked))
    assert counts == [1] * 4
    assert not engine.has_work


def test_nothing_is_written_before_update(lab):
    """Until update no token is appended and no counter moves; collect finds both of the step done.

    A row's tokens begin at num_computed_tokens, and a penalty looks at the outputs so far.
    """
    engine = engine_with(lab, request("decode", 4, 2))
    engine.step()
    engines.add(engine, request("prompt", 3, 4))
    engines.add(engine, request("chunk", 40, 4))
    requests, found = list(engine.requests.values()), {}

    def watch(owner, name):
        call = getattr(owner, name)

        def watched(*args, **kwargs):
            found[name] = {r.request_id: (len(r.output_token_ids), r.num_computed_tokens) for r in requests}
            return call(*args, **kwargs)

        setattr(owner, name, watched)

    watch(engine.backend, "forward")
    watch(engine, "sample")
    watch(engine.scheduler, "update")
    watch(engine, "collect")
    engine.step()
    for name in ("forward", "sample", "update"):
        assert found[name] == {"decode": (1, 4), "prompt": (0, 0), "chunk": (0, 0)}, name
    assert found["collect"] == {"decode": (2, 5), "prompt": (1, 3), "chunk": (0, 12)}


def test_a_failed_pass_counts_nothing(lab):
    """When the model fails, nothing has been counted or said yet: the next step computes the same again."""
    engine = engine_with(lab, request("A", 5, 3), request("B", 4, 3))
    engine.step()
    forward, engine.backend.forward = engine.backend.forward, raises(ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.backend.forward = forward
    assert drain(engine) == {name: engines.alone(request(name, n, 3))[1:] for name, n in (("A", 5), ("B", 4))}


def raises(error):
    """Return a function that raises this error, whatever it is called with."""

    def failing(*_, **__):
        raise error

    return failing


def test_a_partial_chunk_says_nothing(lab):
    """A 30-token prompt under a budget of 7: four silent steps, then its first token."""
    engine = engine_with(lab, request("A", 30, 2), max_num_batched_tokens=7)
    turns = [tokens_of(engine.step()) for _ in range(6)]
    first, second = engines.alone(request("A", 30, 2))
    assert turns == [{}, {}, {}, {}, {"A": [first]}, {"A": [second]}]


def test_a_chunk_of_one_is_no_decode(lab):
    """Beside a decode, a budget of 2 leaves a 4-token prompt one token a step: silent, until the fourth."""
    engine = engine_with(lab, request("A", 2, 9), max_num_batched_tokens=2)
    engine.step()
    engines.add(engine, request("B", 4))
    assert [list(tokens_of(engine.step())) for _ in range(4)] == [["A"], ["A"], ["A"], ["A", "B"]]


def test_silent_and_loud_in_one_step(lab):
    """Beside a decode and a prompt that ends, the chunk of a long prompt gets no Delta and no token."""
    engine = engine_with(lab, request("chat", 4, 9))
    engine.step()
    engines.add(engine, request("short", 3))
    engines.add(engine, request("essay", 40))
    said = engine.step()
    chat, short = engines.alone(request("chat", 4, 9)), engines.alone(request("short", 3))
    assert [delta.request_id for delta in said] == ["chat", "short"]
    assert tokens_of(said) == {"chat": chat[1:2], "short": short[:1]}
    assert engine.requests["essay"].num_computed_tokens == 12
    assert engine.requests["essay"].output_token_ids == []


def test_a_delta_is_the_token_of_this_step(lab):
    """Each Delta brings exactly one token, the one sampled in this very step."""
    engine = engine_with(lab, request("A", 5, 3), request("B", 4, 3))
    expected = {name: engines.alone(request(name, n, 3)) for name, n in (("A", 5), ("B", 4))}
    for i in range(3):
        assert tokens_of(engine.step()) == {name: [tokens[i]] for name, tokens in expected.items()}


def test_each_step_has_a_list_of_its_own(lab):
    """A caller may keep what a step returned: the next step does not change it."""
    engine = engine_with(lab, request("A", 5, 3))
    first = engine.step()
    kept = list(first)
    second = engine.step()
    assert [tokens_of(first), tokens_of(second)] == [
        {"A": [token]} for token in engines.alone(request("A", 5, 3))[:2]
    ]
    assert first == kept


def test_max_tokens_1_gives_one(lab):
    """Three requests for a single token get one each, with the reason, in the step that ends their prompt."""
    played = scenarios.play(lab, SCENARIOS["one token is all they want"])
    assert_drained(played.trace)
    for name in "ABC":
        assert [(len(d.token_ids), d.finish_reason) for d in played.deltas(name)] == [(1, "length")]


def test_forty_requests_in_a_step(lab):
    """Forty prompts end in one step: all forty are computed, and get their first token."""
    entries = [request(f"r{i}", 3 + i % 4) for i in range(40)]
    engine = engine_with(lab, *entries, max_num_seqs=40, max_num_batched_tokens=200)
    said = tokens_of(engine.step())
    assert list(said) == [entry["id"] for entry in entries]
    assert said == {entry["id"]: engines.alone(entry)[:1] for entry in entries}


def test_deltas_come_in_row_order(lab):
    """In every step of a run that preempts, the Deltas stand in the order of the schedule's rows."""
    played = scenarios.play(lab, SCENARIOS["the important one comes late, and the rows change places"])
    assert_drained(played.trace)
    orders = []
    for turn, record in zip(played.turns, played.trace.steps, strict=True):
        orders.append([delta.request_id for delta in turn])
        assert orders[-1] == [name for name in record.scheduled if name in record.new_tokens]
    assert ["C", "B"] in orders  # B came first, was preempted, and is behind C now


# ------------------------------------------------------------------------------ between two steps


def test_room_of_the_finished_is_free_when_step_returns(lab):
    """Free finished first: when the step of the last token returns, the blocks are back already."""
    engine = engine_with(
        lab, request("A", 9, 3), request("B", 9, 4), num_blocks=12, max_num_batched_tokens=18
    )
    free = []
    for turn in turns(engine):
        reasons = [delta.finish_reason for delta in turn]
        free.append((engine.scheduler.kv.num_free_blocks, reasons))
    assert free == [(6, [None, None]), (6, [None, None]), (9, ["length", None]), (12, ["length"])]


# -------------------------------------------------------------------------------------- whole runs


def check_texts(scenario, played):
    """Each request's tokens are those of a run alone (of an aborted one, as far as it came)."""
    assert_drained(played.trace)
    gone = {abort["id"] for abort in scenario["aborts"]}
    for entry in scenario["requests"]:
        expected = engines.alone(entry, scenario["config"].get("model", "tiny"))
        tokens = played.tokens(entry["id"])
        if entry["id"] in gone:
            expected = expected[: len(tokens)]
        assert (entry["id"], tokens) == (entry["id"], expected)
    assert played.engine.requests == {}
    assert played.trace.end.num_free_blocks == scenario["config"]["num_blocks"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_text_is_that_of_a_run_alone(lab, name):
    """Chunked, mixed, preempted, cached, sampled, beside others: each request says what it says alone."""
    check_texts(SCENARIOS[name], scenarios.play(lab, SCENARIOS[name]))


def test_a_neighbour_does_not_shift_the_draws(lab):
    """Two requests with one seed draw the same tokens, side by side and alone: they share no generator."""
    twins = [request(name, list(range(9)), 8, temperature=1.0, seed=0) for name in "AB"]
    text = engines.alone(twins[0])
    assert drain(engine_with(lab, twins[0])) == {"A": text}
    assert drain(engine_with(lab, *twins, max_num_batched_tokens=18)) == {"A": text, "B": text}


@pytest.mark.parametrize("name", ["the plays", "preempted, twice over"])
def test_the_parts_of_all_labs_fit_together(lab, name):
    """Among the parts of labs 01 to 06 in place of the engine's, step gives the same decisions and texts."""
    earlier = find_lab("lab-07").prerequisites
    learner = LearnerParts.from_labs(",".join(earlier), impl="solution")
    played = scenarios.play(lab, SCENARIOS[name], learner=learner)
    check_texts(SCENARIOS[name], played)
    own = {"Sampler", "OutputText", "Stream", "propose", "grammar"}
    assert set(played.trace.header.parts) == {part.name for part in fields(Parts)} - own
    assert first_difference(played.trace, scenarios.run(lab, SCENARIOS[name])) is None


def test_a_stop_string_ends_the_request(lab):
    """A stop string ends a request before max_tokens: it is in the tokens, not in the text, and reported."""
    entry = request("king", "KING HENRY:\nMy lord of ", 25)
    tokens = engines.alone(entry, "shakespeare")
    text = engines.tokenizer("shakespeare").decode(tokens)
    stop = text[12:15]
    scenario = SCENARIOS["the plays"] | {"requests": [entry | {"stop": [stop], "at": 0}]}
    played = scenarios.play(lab, scenario)
    assert_drained(played.trace)
    assert played.text("king") == text[: text.index(stop)]
    assert played.tokens("king") == tokens[: text.index(stop) + len(stop)]  # a token is a character
    last = played.deltas("king")[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)


# --------------------------------------------------------------------------------------- a stream


def streams(lab, *requests, **config):
    """An engine with the reference's step, and the lab's Stream of each request."""
    engine = scenarios.make_engine(**config)
    return engine, [lab.Stream(engine, engines.add(engine, entry)) for entry in requests]


def count_steps(engine):
    return engine.scheduler.step


def test_a_stream_has_the_deltas_of_one_in_order(lab):
    """One request's Deltas, all of them, in order, and no other request's."""
    engine, (stream,) = streams(lab, request("A", 5, 6))
    engines.add(engine, request("B", 3, 9))
    deltas = list(stream)
    assert {delta.request_id for delta in deltas} == {"A"}
    assert [token for d in deltas for token in d.token_ids] == engines.alone(request("A", 5, 6))
    assert [d.finish_reason for d in deltas] == [None] * 5 + ["length"]


def test_a_delta_costs_one_step(lab):
    """A token is handed out in the step in which it was made, not when the request is done."""
    engine, (stream,) = streams(lab, request("A", 5, 6))
    for number in range(1, 7):
        next(stream)
        assert count_steps(engine) == number


def test_a_stream_waits_through_silent_steps(lab):
    """The chunks of a long prompt bring no token: asking once takes five steps and gives the first one."""
    engine, (stream,) = streams(lab, request("A", 30, 2), max_num_batched_tokens=7)
    assert next(stream).token_ids == engines.alone(request("A", 30, 2))[:1]
    assert count_steps(engine) == 5


def test_a_stream_does_not_give_up(lab):
    """A reader behind a very long prompt waits through 5,000 silent steps, in one call."""
    engine = engines.Silent(5000)
    stream = lab.Stream(engine, SimpleNamespace(request_id="A", finish_reason=None))
    assert next(stream).finish_reason is None
    assert engine.num_steps == 0


def test_nothing_unread_is_lost(lab):
    """A reader that comes back late finds all of 2,000 Deltas in its inbox, in order, and takes no step."""
    engine = engines.Silent(5)
    stream = lab.Stream(engine, SimpleNamespace(request_id="A", finish_reason=None))
    engine.inboxes["A"].extend(SimpleNamespace(finish_reason=None, number=i) for i in range(2000))
    assert [next(stream).number for _ in range(2000)] == list(range(2000))
    assert engine.num_steps == 5


def test_reading_one_serves_all(lab):
    """While A is read to its end, B's Deltas gather in order, and reading them takes no step more."""
    engine, (a, b) = streams(lab, request("A", 5, 6), request("B", 4, 4))
    list(a)
    steps = count_steps(engine)
    assert [token for d in b for token in d.token_ids] == engines.alone(request("B", 4, 4))
    assert count_steps(engine) == steps == 6


def test_a_stream_that_is_over_stays_over(lab):
    """After the last Delta comes StopIteration, again and again, and no step is taken for it."""
    engine, (stream,) = streams(lab, request("A", 5, 2))
    engines.add(engine, request("B", 5, 9))
    list(stream)
    steps = count_steps(engine)
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(stream)
    assert count_steps(engine) == steps


def test_closing_aborts(lab):
    """Closing a stream half-way, or before it is read, aborts its request: its room is free, others go on."""
    engine, (stream, unread) = streams(lab, request("A", 9, 30), request("C", 9, 30))
    engines.add(engine, request("B", 5, 6))
    unread.close()
    next(stream)
    stream.close()
    assert list(engine.requests) == ["B"]
    with pytest.raises(StopIteration):
        next(stream)
    assert drain(engine) == {"B": engines.alone(request("B", 5, 6))[1:]}
    assert engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks


def test_closing_at_the_end_aborts_nothing(lab):
    """A stream that was read to its end is closed; by then its id is another request's, which goes on."""
    engine, (first,) = streams(lab, request("A", 5, 2))
    list(first)
    second = lab.Stream(engine, engines.add(engine, request("A", 7, 5)))
    first.close()
    assert [t for d in second for t in d.token_ids] == engines.alone(request("A", 7, 5))


def test_closing_before_the_last_delta_is_read(lab):
    """The request is done and its id taken, but Deltas lie unread: they are dropped, the new one goes on."""
    engine, (first,) = streams(lab, request("A", 5, 2))
    drain(engine)
    second = lab.Stream(engine, engines.add(engine, request("A", 7, 5)))
    first.close()
    assert list(first) == []
    assert [t for d in second for t in d.token_ids] == engines.alone(request("A", 7, 5))


def test_closing_again_does_nothing(lab):
    """A stream is closed half-way, its id taken by another request, and closed again: the new one goes on."""
    engine, (first,) = streams(lab, request("A", 5, 9))
    next(first)
    first.close()
    second = lab.Stream(engine, engines.add(engine, request("A", 7, 5)))
    first.close()
    assert [t for d in second for t in d.token_ids] == engines.alone(request("A", 7, 5))


def test_no_inbox_is_left_behind(lab):
    """A stream that is closed, or has returned its last Delta, leaves no inbox in the engine."""
    engine, (read, closed) = streams(lab, request("A", 5, 2), request("B", 5, 9))
    assert [next(read).finish_reason for _ in range(2)] == [None, "length"]
    assert list(engine.inboxes) == ["B"]
    closed.close()
    assert engine.inboxes == {}


def test_closing_takes_the_inbox_back(lab):
    """An engine that forgets no inbox by itself has none when the stream has been closed."""
    engine = engines.Silent(3)
    lab.Stream(engine, SimpleNamespace(request_id="A", finish_reason=None)).close()
    assert engine.inboxes == {}


@pytest.mark.parametrize("error", [NoWorkError, KeyError, MemoryError, OSError])
def test_an_error_is_not_the_end(lab, error):
    """When the engine fails, the reader gets the error: a text that just ends would look complete."""
    engine, (stream,) = streams(lab, request("A", 5))
    engine.scheduler.schedule = raises(error)
    with pytest.raises(error):
        next(stream)


@pytest.mark.parametrize("error", [MemoryError, OSError, KeyboardInterrupt])
def test_after_an_error_the_stream_goes_on(lab, error):
    """An error closes nothing: when the engine works again, the next read gives the next Delta."""
    engine, (stream,) = streams(lab, request("A", 5, 4))
    said = [next(stream)]
    forward, engine.backend.forward = engine.backend.forward, raises(error)
    for _ in range(2):
        with pytest.raises(error):
            next(stream)
    engine.backend.forward = forward
    said += stream
    assert [token for delta in said for token in delta.token_ids] == engines.alone(request("A", 5, 4))


def test_a_lost_delta_is_not_the_end(lab):
    """An error came when the request was finished and its last Delta not yet made: reading on is an error."""
    engine, (stream,) = streams(lab, request("A", 5, 1))
    engine.collect = raises(MemoryError)
    with pytest.raises(MemoryError):
        next(stream)
    with pytest.raises(NoWorkError):
        next(stream)


def test_an_abort_ends_the_stream(lab):
    """When the request is aborted from elsewhere, its reader gets a last Delta that says so."""
    engine, (stream,) = streams(lab, request("A", 5, 9))
    next(stream)
    engine.abort("A")
    assert [(d.token_ids, d.finish_reason) for d in stream] == [([], "abort")]


# ------------------------------------------------------------------------------- text, stop strings


def output_text(lab, pieces, stop):
    """An OutputText, and the token ids of `pieces`: each piece of text is a token."""
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=pieces[0]))
    backend.decoder = tokenizers.decoders.Fuse()
    return lab.OutputText(Tokenizer(backend, source="pieces"), tuple(stop)), [vocabulary[p] for p in pieces]


def given_out(lab, pieces, stop):
    """Return the text given out token by token up to a stop string (or the end), and that stop string."""
    text, tokens = output_text(lab, pieces, stop)
    given, reached = [], None
    for number, token in enumerate(tokens, 1):
        reached = text.feed(token)
        given.append(text.take(reached is not None or number == len(tokens)))
        if reached:
            break
    return given, reached


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["one", " END", " two"], ["END"], "one "),
        (["one E", "N", "D two"], ["END"], "one "),
        (["END"], ["END"], ""),
        (["one ENE", " END"], ["END"], "one ENE "),
        (["a", "a", "b"], ["ab"], "a"),
        (["ab", "ab", "ac"], ["abac"], "ab"),
        (["so", "\n", "\n", "no"], ["\n\n", "zzz"], "so"),
        (["the end, the-END, ", "the END, no END"], [" END"], "the end, the-END, the"),
        (["wait", "..", ". no"], ["..."], "wait"),
        (["ok <|", "im_", "end", "|> no"], ["<|im_end|>"], "ok "),
    ],
)
def test_a_stop_string_cuts_the_text(lab, pieces, stop, text):
    """In one token, across several, or after a false start: the text ends just before it."""
    given, reached = given_out(lab, pieces, stop)
    assert ("".join(given), reached) == (text, stop[0])


def test_the_first_in_the_text_counts(lab):
    """The stop string that begins first cuts the text, of two in one token: not the first named, nor
    the longer, nor the one that ends first."""
    assert given_out(lab, ["go ", "on stop end"], ["end", "stop"]) == (["go ", "on "], "stop")
    assert given_out(lab, ["go ", "to end stop"], ["stop", "end"]) == (["go ", "to "], "end")
    assert given_out(lab, ["go ", "to end stop"], ["d s", "end stop"]) == (["go ", "to "], "end stop")


@pytest.mark.parametrize("stop", [["end", "ending"], ["ending", "end"]])
def test_of_two_at_one_place_the_shorter_counts(lab, stop):
    """When two stop strings begin at the same place, the shorter was complete first: that one is reported."""
    assert given_out(lab, ["the ", "ending"], stop) == (["the ", ""], "end")
    assert given_out(lab, ["the ", "e", "n", "ding"], stop) == (["the ", "", "", ""], "end")


def test_no_part_of_a_stop_string_is_shown(lab):
    """However the text is cut into tokens, nothing is given out that a stop string then takes back."""
    whole, stop = "ababac, and so on", ["abac", "c, a"]
    for size in (1, 2, 3, 4, 5):
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        assert "".join(given_out(lab, pieces, stop)[0]) == "ab"


@pytest.mark.parametrize("stop", [["bX", "abY"], ["abY", "bX"]])
def test_the_longest_doubt_counts(lab, stop):
    """When the end of the text may begin several stop strings, the one with most of it decides."""
    assert given_out(lab, ["c", "ab", "Y"], stop) == (["c", "", ""], "abY")
    assert given_out(lab, ["c", "ab", "X"], stop) == (["c", "", "a"], "bX")
    assert given_out(lab, ["c", "ab", "Z"], stop) == (["c", "", "abZ"], None)


def test_a_long_stop_string_is_held_back_whole(lab):
    """A stop string of 500 characters comes in pieces of 3; the text is the 5,000 characters before it."""
    stop = "<" + "-" * 498 + ">"
    whole = "x" * 5000 + stop + " no"
    pieces = [whole[i : i + 3] for i in range(0, len(whole), 3)]
    given, reached = given_out(lab, pieces, [f"{i}!" for i in range(20)] + [stop])
    assert ("".join(given), reached) == ("x" * 5000, stop)
    doubt = given_out(lab, ["x", *pieces[1667:-30], "y"], [stop])[0]
    assert "".join(doubt) == "x" + "".join(pieces[1667:-30]) + "y"


def test_text_is_all_that_was_decoded(lab):
    """`text` grows with each piece, what is held back included, and ends before a stop string."""
    text, tokens = output_text(lab, ["so ", "E", "N", "x", " END", " no"], ["END"])
    seen = []
    for token in tokens[:5]:
        text.feed(token)
        text.take(False)
        seen.append(getattr(text, "text", None))
    # A class that keeps no text, because its __init__ is another, has none to be looked at.
    assert seen in (["so ", "so E", "so EN", "so ENx", "so ENx "], [None] * 5)


def test_without_stop_strings_nothing_is_held_back(lab):
    """Most requests have none: each token's text is given out with it."""
    assert given_out(lab, ["a", "E", "N"], []) == (["a", "E", "N"], None)


def test_text_is_given_when_it_is_decided(lab):
    """Only what may begin a stop string is held back, and only until the next token decides."""
    assert given_out(lab, ["a", "E", "N", "x", "b"], ["END"]) == (["a", "", "", "ENx", "b"], None)


def test_at_the_end_nothing_is_held_back(lab):
    """A text that ends in half a stop string is given out whole when the request is finished."""
    assert given_out(lab, ["a", " E", "N"], ["END"]) == (["a", " ", "EN"], None)
    assert given_out(lab, ["a", " E"], ["END"]) == (["a", " E"], None)


def only(**parts):
    """Parts of an engine with some replaced, as `make_engine` takes them."""
    return SimpleNamespace(parts=replace(Parts(), **parts), names={})


# --------------------------------------------------------------------------------------- at random


def test_random_scripts(lab):
    """Steps, readers and texts in random scripts: arrivals, aborts, errors, ids used again, stop strings."""
    judge_random_scripts("lab-07", lab)
