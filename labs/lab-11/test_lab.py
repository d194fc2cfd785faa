"""Tests of the server's front, on a virtual clock: what each client reads and when, and what it waits for.

A step of the toy engine takes 0.1 s. Nothing here sleeps, and no thread is started.
"""

import pytest

from labs.kit import judge_random_scripts, load

scenarios = load("lab-11", "scenarios")


def played(lab, *ops, slots=4, max_num_requests=4):
    """Play calls on the lab's front; return what could be seen after the last one, and what it returned."""
    log = scenarios.run(lab, scenarios.scenario("", *ops, slots=slots, max_num_requests=max_num_requests))
    last = log.steps[-1]
    return last.observed | {"returned": last.returned}


def right(lab, *ops, **config):
    """Play calls; no rule of threads is broken meanwhile."""
    seen = played(lab, *ops, **config)
    assert seen["faults"] == []
    return seen


# -------------------------------------------------------------------------------------------- send


def test_a_command_wakes_the_engine(lab):
    """The engine has nothing to do, and a command comes: it is carried out at once."""
    seen = right(lab, ("wait", 0.5), ("look", "x", 0.0))
    assert seen["answers"] == {"x": "none at 0.50 s"}


def test_a_command_is_answered_between_two_steps(lab):
    """A command that comes during a step is carried out as soon as the step is over, before the next one."""
    seen = right(lab, ("open", "a", "r1", 5), ("wait", 0.13), ("look", "x", 0.0), ("wait", 0.08))
    assert seen["answers"] == {"x": "r1 at 0.20 s"}


def test_commands_keep_their_order(lab):
    """The first command is carried out first, and sees nothing of those that were sent later."""
    seen = right(
        lab, ("open", "a", "r1", 9), ("wait", 0.03), ("look", "x", 0.0), ("open", "b", "r2", 9),
        ("look", "y", 0.0), ("leave", "a"), ("look", "z", 0.0), ("wait", 0.1),
    )  # fmt: skip
    assert seen["answers"] == {"x": "r1 at 0.10 s", "y": "r1 r2 at 0.10 s", "z": "r2 at 0.10 s"}


def test_a_closed_engine_takes_no_command(lab):
    """When the engine has been closed, EngineClosedError is raised at once, for commands and requests."""
    seen = right(lab, ("close",), ("wait", 0.1), ("look", "x", 0.0), ("open", "a", "r1", 1), ("drain",))
    assert seen["answers"] == {"x": "EngineClosedError at 0.10 s"}
    assert seen["clients"] == {"a": "EngineClosedError at 0.10 s"}


# -------------------------------------------------------------------------------------------- turn


def test_tokens_come_with_each_step(lab):
    """One reader: a token every 0.1 s, each as soon as it is there, and the stream ends with the last."""
    seen = right(lab, ("open", "a", "r1", 3), ("drain",))
    assert seen["read"] == {"a": ["a0 at 0.10 s", "a1 at 0.20 s", "a2 at 0.30 s, the last"]}
    assert seen["clients"] == {"a": "done at 0.30 s"}


def test_each_reader_has_its_own_tokens(lab):
    """Three readers on one engine: none reads a token of another."""
    seen = right(
        lab, ("open", "a", "r1", 3), ("wait", 0.05), ("open", "b", "r2", 2), ("open", "c", "r3", 1),
        ("drain",),
    )  # fmt: skip
    assert seen["read"] == {
        "a": ["a0 at 0.10 s", "a1 at 0.20 s", "a2 at 0.30 s, the last"],
        "b": ["b0 at 0.20 s", "b1 at 0.30 s, the last"],
        "c": ["c0 at 0.20 s, the last"],
    }


def test_all_commands_before_a_step(lab):
    """Three requests come during a step: all three are part of the next one."""
    ops = [("open", name, f"r{number}", 2) for number, name in enumerate("bcd")]
    seen = right(lab, ("open", "a", "r9", 4), ("wait", 0.04), *ops, ("wait", 0.17))
    assert seen["tokens computed"] == {"a": 2, "b": 1, "c": 1, "d": 1}


def test_commands_that_keep_coming_do_not_hold_up_the_steps(lab):
    """A command that comes while others are carried out waits for the next turn, after the step."""
    looks = [(("look", f"x{n}", 0.05), ("wait", 0.04)) for n in range(6)]
    seen = right(
        lab, ("open", "a", "r1", 9), ("wait", 0.05), *(op for pair in looks for op in pair), ("wait", 0.02)
    )
    assert seen["read"]["a"] == ["a0 at 0.10 s", "a1 at 0.30 s"]


def test_steps_do_not_hold_up_commands(lab):
    """With much to compute a command waits for the step that is being computed, and for no other."""
    seen = right(
        lab, ("open", "a", "r1", 40), ("wait", 0.15), ("look", "x", 0.0), ("wait", 0.2),
        ("open", "b", "r2", 1), ("wait", 0.2),
    )  # fmt: skip
    assert seen["answers"] == {"x": "r1 at 0.20 s"}
    assert seen["read"]["b"] == ["b0 at 0.50 s, the last"]


def test_the_answer_does_not_wait_for_the_step(lab):
    """The answer to a command is there as soon as it has been carried out, not at the end of the turn."""
    seen = right(
        lab, ("open", "a", "r1", 3), ("wait", 0.05), ("look", "x", 0.01), ("look", "y", 0.01), ("wait", 0.09)
    )
    assert seen["answers"] == {"x": "r1 at 0.11 s", "y": "r1 at 0.12 s"}


def test_a_refused_request_harms_no_one(lab):
    """An id is in use: the second reader gets the ValueError, the first goes on."""
    seen = right(lab, ("open", "a", "r1", 3), ("wait", 0.05), ("open", "b", "r1", 2), ("drain",))
    assert seen["clients"] == {"a": "done at 0.30 s", "b": "ValueError at 0.10 s"}
    assert seen["read"]["a"] == ["a0 at 0.10 s", "a1 at 0.20 s", "a2 at 0.30 s, the last"]
    assert (seen["num_requests"], seen["tokens computed"]) == (0, {"a": 3})


def test_a_finished_request_is_forgotten(lab):
    """The engine has finished a request: a later step that fails neither aborts it nor gives it an error."""
    seen = right(
        lab, ("open", "a", "r1", 2, 1), ("open", "b", "r2", 9), ("wait", 0.35), ("fail", "out of memory"),
        ("wait", 0.2), ("resume", "a"), ("drain",),
    )  # fmt: skip
    assert seen["read"]["a"] == ["a0 at 0.10 s", "a1 at 0.55 s, the last"]


def test_an_error_of_a_command_is_its_callers(lab):
    """A command raises an error of its own: its client gets that error, and all others go on."""
    seen = right(
        lab, ("open", "a", "r1", 3), ("wait", 0.05), ("look", "x", -1.0), ("look", "y", 0.0), ("drain",)
    )
    assert seen["answers"] == {"x": "LookupError at 0.10 s", "y": "r1 at 0.10 s"}
    assert seen["clients"] == {"a": "done at 0.30 s"}


def test_a_command_whose_client_has_left(lab):
    """A client leaves before its request was added: the others are served as if it had never come."""
    seen = right(
        lab, ("open", "a", "r1", 3), ("wait", 0.03), ("open", "b", "r2", 5), ("wait", 0.03), ("leave", "b"),
        ("drain",),
    )  # fmt: skip
    assert seen["clients"] == {"a": "done at 0.30 s", "b": "left at 0.06 s"}
    assert seen["tokens computed"] == {"a": 3}


def test_without_a_request_there_is_no_step(lab):
    """Without a request there is no step, whatever commands come."""
    seen = right(lab, ("look", "x", 0.0), ("wait", 0.3), ("look", "y", 0.0), ("drain",))
    assert seen["answers"] == {"x": "none at 0.00 s", "y": "none at 0.30 s"}


def test_commands_after_the_close_are_not_carried_out(lab):
    """A request and a command are sent after the close: EngineClosedError, and the engine never sees them."""
    seen = right(
        lab, ("open", "a", "r1", 9), ("wait", 0.05), ("close",), ("open", "b", "r2", 9), ("look", "x", 0.0),
        ("drain",),
    )  # fmt: skip
    assert seen["clients"] == {"a": "done at 0.10 s", "b": "EngineClosedError at 0.10 s"}
    assert seen["answers"] == {"x": "EngineClosedError at 0.10 s"}
    assert seen["tokens computed"] == {"a": 1}


# ---------------------------------------------------------------------------------------- fail_all


def test_a_failed_step_reaches_every_reader(lab):
    """A step fails: every open reader gets one last Delta with the reason, and its stream ends."""
    ops = [("open", name, f"r{number}", 9) for number, name in enumerate("abc")]
    seen = right(lab, *ops, ("wait", 0.15), ("fail", "out of memory"), ("drain",))
    assert [read[-1] for read in seen["read"].values()] == ["error at 0.20 s: out of memory"] * 3
    assert [*seen["clients"].values()] == ["done at 0.20 s"] * 3
    assert seen["num_requests"] == 0


def test_the_engine_goes_on_after_a_failed_step(lab):
    """The requests that failed are aborted; the next one is served, even under an id that has failed."""
    seen = right(
        lab, ("open", "a", "r1", 9), ("open", "b", "r2", 9), ("wait", 0.15), ("fail", "out of memory"),
        ("wait", 0.1), ("open", "c", "r1", 2), ("drain",),
    )  # fmt: skip
    assert seen["read"]["c"] == ["c0 at 0.35 s", "c1 at 0.45 s, the last"]
    assert seen["returned"] == {"wait for ever": [], "left in the engine": []}


def test_a_slow_reader_learns_of_the_failure_too(lab):
    """A reader that does nothing when a step fails finds what came before, and then the error."""
    seen = right(
        lab, ("open", "a", "r1", 9, 1), ("wait", 0.25), ("fail", "out of memory"), ("wait", 0.2),
        ("resume", "a"), ("drain",),
    )  # fmt: skip
    assert seen["read"]["a"] == [
        "a0 at 0.10 s", "a1 at 0.45 s", "a2 at 0.45 s", "error at 0.45 s: out of memory",
    ]  # fmt: skip


def test_what_has_failed_is_forgotten(lab):
    """A step fails twice, for different requests: those that failed first are not aborted again."""
    seen = right(
        lab, ("open", "a", "r1", 9), ("wait", 0.15), ("fail", "out of memory"), ("wait", 0.1),
        ("open", "b", "r2", 9), ("wait", 0.15), ("fail", "out of memory"), ("drain",),
    )  # fmt: skip
    assert seen["read"]["b"] == ["b0 at 0.35 s", "b1 at 0.45 s", "error at 0.45 s: out of memory"]


def test_closing_ends_every_reader(lab):
    """close() ends all open requests after the step, with an error, and the engine keeps none of them."""
    seen = right(lab, ("open", "a", "r1", 9), ("open", "b", "r2", 9), ("wait", 0.15), ("close",), ("drain",))
    assert seen["read"] == {
        "a": ["a0 at 0.10 s", "a1 at 0.20 s", "error at 0.20 s: the engine was closed"],
        "b": ["b0 at 0.20 s", "error at 0.20 s: the engine was closed"],
    }
    assert seen["returned"] == {"wait for ever": [], "left in the engine": []}


# ------------------------------------------------------------------------------------------- serve


def test_the_event_loop_is_free_during_a_step(lab):
    """A step is computed in the engine's thread: meanwhile a client comes and another leaves, on time."""
    seen = right(
        lab, ("open", "a", "r1", 9), ("open", "b", "r2", 9), ("wait", 0.03), ("leave", "b"), ("wait", 0.03),
        ("open", "c", "r3", 1), ("wait", 0.01),
    )  # fmt: skip
    assert seen["time"] == "0.07 s"
    assert seen["clients"] == {"a": "waits", "b": "left at 0.03 s", "c": "waits"}


def test_an_idle_engine_waits(lab):
    """With nothing to do the event loop rests: no turn is taken, before the first request and after it."""
    right(lab, ("wait", 1.0))
    seen = right(lab, ("open", "a", "r1", 1), ("wait", 5.0), ("open", "b", "r2", 1), ("wait", 5.0))
    assert seen["read"] == {"a": ["a0 at 0.10 s, the last"], "b": ["b0 at 5.10 s, the last"]}


def test_what_comes_during_the_last_step_is_not_lost(lab):
    """A request comes while the only other one gets its last token: it is served right afterwards."""
    seen = right(lab, ("open", "a", "r1", 1), ("wait", 0.05), ("open", "b", "r2", 1), ("drain",))
    assert seen["read"]["b"] == ["b0 at 0.20 s, the last"]


def test_a_command_during_the_last_step_is_not_lost(lab):
    """A command that comes while the last token is computed is carried out, though no step follows."""
    seen = right(lab, ("open", "a", "r1", 1), ("wait", 0.05), ("look", "x", 0.0), ("drain",))
    assert seen["answers"] == {"x": "none at 0.10 s"}


def test_a_command_during_a_command_is_not_lost(lab):
    """A command that comes while another is carried out, with nothing to compute, is carried out after it."""
    seen = right(lab, ("look", "x", 0.05), ("wait", 0.02), ("look", "y", 0.05), ("drain",))
    assert seen["answers"] == {"x": "none at 0.05 s", "y": "none at 0.10 s"}


def test_steps_follow_one_another(lab):
    """No time passes between two steps, with readers that wait and with one that does not read."""
    seen = right(lab, ("open", "a", "r1", 5, 1), ("open", "b", "r2", 5), ("wait", 0.61))
    assert seen["read"]["b"][-1] == "b4 at 0.60 s, the last"


def test_a_broken_engine_ends_every_reader(lab):
    """The device is gone, and even an abort fails: no reader waits for ever, and later ones get the error."""
    seen = right(
        lab, ("open", "a", "r1", 9), ("open", "b", "r2", 9), ("wait", 0.15), ("fail", "the device is gone"),
        ("wait", 0.1), ("open", "c", "r3", 1), ("look", "x", 0.0), ("drain",),
    )  # fmt: skip
    assert [seen["read"][name][-1] for name in "ab"] == ["error at 0.20 s: the device is gone"] * 2
    assert seen["clients"]["c"] == "EngineClosedError at 0.25 s"
    assert seen["answers"] == {"x": "EngineClosedError at 0.25 s"}
    assert seen["returned"]["wait for ever"] == []


def test_what_waits_when_the_engine_breaks_is_answered(lab):
    """Commands that come in the turn in which the engine breaks get an EngineClosedError."""
    seen = right(
        lab, ("open", "a", "r1", 9), ("wait", 0.05), ("look", "x", 0.1), ("fail", "the device is gone"),
        ("wait", 0.1), ("look", "y", 0.0), ("open", "b", "r2", 1), ("drain",),
    )  # fmt: skip
    assert seen["answers"]["x"] == "r1 at 0.20 s"
    ends = [seen["answers"]["y"], seen["clients"]["b"]]
    assert [end.partition(" at ")[0] for end in ends] == ["EngineClosedError"] * 2


# ------------------------------------------------------------------------------------------ stream


def test_no_more_than_max_num_requests(lab):
    """The third of two is refused at once, and is not queued; when one has ended there is a place again."""
    seen = right(
        lab, ("open", "a", "r1", 1), ("open", "b", "r2", 5), ("open", "c", "r3", 1), ("wait", 0.15),
        ("open", "d", "r4", 1), ("open", "e", "r5", 1), ("drain",), max_num_requests=2,
    )  # fmt: skip
    assert (seen["clients"]["c"], seen["clients"]["e"]) == (
        "EngineFullError at 0.00 s",
        "EngineFullError at 0.15 s",
    )
    assert seen["read"]["d"] == ["d0 at 0.30 s, the last"]


def test_a_place_is_taken_before_the_engine_knows(lab):
    """Requests that wait for the engine's thread count: three come, and there is place for two."""
    seen = right(
        lab, ("open", "a", "r1", 9), ("wait", 0.02), ("open", "b", "r2", 1), ("open", "c", "r3", 1),
        max_num_requests=2,
    )  # fmt: skip
    assert seen["clients"] == {"a": "waits", "b": "waits", "c": "EngineFullError at 0.02 s"}
    assert seen["num_requests"] == 2


def test_what_is_not_read_is_still_open(lab):
    """A reader that does not read keeps its place though the engine has finished: its tokens wait here."""
    seen = right(
        lab, ("open", "a", "r1", 3, 1), ("wait", 0.5), ("open", "b", "r2", 1), ("resume", "a"),
        ("open", "c", "r3", 1), ("drain",), max_num_requests=1,
    )  # fmt: skip
    assert seen["clients"] == {"a": "done at 0.50 s", "b": "EngineFullError at 0.50 s", "c": "done at 0.60 s"}


def test_a_slow_reader_stops_no_one(lab):
    """One reads a token and then nothing: the other gets its tokens on time, and the first one loses none."""
    seen = right(
        lab, ("open", "a", "r1", 6, 1), ("open", "b", "r2", 4), ("wait", 0.75), ("resume", "a"), ("drain",)
    )
    assert seen["read"]["b"][-1] == "b3 at 0.50 s, the last"
    assert seen["read"]["a"] == [
        "a0 at 0.10 s",
        *(f"a{n} at 0.75 s" for n in range(1, 5)),
        "a5 at 0.75 s, the last",
    ]


@pytest.mark.parametrize("reads", [99, 1])
def test_leaving_stops_the_computing(lab, reads):
    """A client leaves, while it waits or while it does not read: the next step is without it."""
    seen = right(
        lab, ("open", "a", "r1", 9, reads), ("open", "b", "r2", 9), ("wait", 0.13), ("leave", "a"),
        ("wait", 0.5),
    )  # fmt: skip
    assert seen["tokens computed"] == {"a": 2, "b": 5}
    assert seen["clients"]["a"] == "left at 0.13 s"


def test_leaving_with_tokens_unread_stops_the_computing(lab):
    """A client has stopped reading, and tokens wait for it; it leaves: the next step is without it."""
    seen = right(lab, ("open", "a", "r1", 9, 1), ("wait", 0.33), ("leave", "a"), ("wait", 0.5))
    assert (seen["tokens computed"], seen["num_requests"]) == ({"a": 4}, 0)


def test_leaving_gives_the_place_back_at_once(lab):
    """A client leaves in the middle of a step: another takes its place before the step is over."""
    seen = right(
        lab, ("open", "a", "r1", 9), ("wait", 0.03), ("leave", "a"), ("open", "b", "r2", 1), ("drain",),
        max_num_requests=1,
    )  # fmt: skip
    assert seen["clients"] == {"a": "left at 0.03 s", "b": "done at 0.20 s"}


def test_a_place_comes_back_however_a_request_ends(lab):
    """Finished, left before it was added, refused, failed: afterwards no place is taken."""
    seen = right(
        lab, ("open", "a", "r1", 5), ("wait", 0.05), ("open", "b", "r1", 1), ("open", "c", "r3", 1),
        ("leave", "c"), ("wait", 0.1), ("fail", "out of memory"), ("drain",),
    )  # fmt: skip
    assert seen["clients"] == {"a": "done at 0.20 s", "b": "ValueError at 0.10 s", "c": "left at 0.05 s"}
    assert seen["num_requests"] == 0


def test_a_place_is_given_back_once(lab):
    """One of two readers leaves, and the other reads on: afterwards there is one place, and not two."""
    seen = right(
        lab, ("open", "a", "r1", 9), ("open", "b", "r2", 9), ("wait", 0.15), ("leave", "a"), ("wait", 0.2),
        ("open", "c", "r3", 1), ("open", "d", "r4", 1), max_num_requests=2,
    )  # fmt: skip
    assert (seen["clients"]["c"], seen["clients"]["d"]) == ("waits", "EngineFullError at 0.35 s")


def test_what_was_aborted_is_forgotten(lab):
    """A reader has left, and then a step fails: the request that was aborted is not aborted again."""
    seen = right(
        lab, ("open", "a", "r1", 9), ("open", "b", "r2", 9), ("wait", 0.15), ("leave", "a"), ("wait", 0.2),
        ("fail", "out of memory"), ("drain",),
    )  # fmt: skip
    assert seen["read"]["b"][-1] == "error at 0.40 s: out of memory"


def test_leaving_after_the_last_token_was_computed(lab):
    """The engine has finished the request, and its reader leaves without reading: nothing is aborted."""
    seen = right(lab, ("open", "a", "r1", 3, 1), ("wait", 0.5), ("leave", "a"), ("drain",))
    assert seen["returned"] == {"wait for ever": [], "left in the engine": []}
    assert seen["num_requests"] == 0


def test_an_old_reader_does_not_abort_a_new_request(lab):
    """An id is used again before its first reader has read to the end. That one leaves; the new one stays."""
    seen = right(
        lab, ("open", "a", "r1", 2, 1), ("wait", 0.25), ("open", "b", "r1", 3), ("wait", 0.05),
        ("leave", "a"), ("drain",),
    )  # fmt: skip
    assert seen["read"]["b"] == ["b0 at 0.35 s", "b1 at 0.45 s", "b2 at 0.55 s, the last"]


def test_a_refused_reader_aborts_no_one(lab):
    """A request is refused, or its client leaves, while another runs under the same id: that one goes on."""
    seen = right(
        lab, ("open", "a", "r1", 4), ("wait", 0.05), ("open", "b", "r1", 2), ("open", "c", "r1", 2),
        ("leave", "c"), ("drain",),
    )  # fmt: skip
    assert seen["read"]["a"][-1] == "a3 at 0.40 s, the last"
    assert seen["clients"]["c"] == "left at 0.05 s"


def test_an_id_again_in_the_middle_of_a_step(lab):
    """One leaves during a step and another comes with its id: the step's token is not read by the new one."""
    seen = right(
        lab, ("open", "a", "r1", 9), ("wait", 0.03), ("leave", "a"), ("open", "b", "r1", 2), ("drain",)
    )
    assert seen["read"] == {"a": [], "b": ["b0 at 0.20 s", "b1 at 0.30 s, the last"]}


def test_an_id_again_can_be_left_again(lab):
    """An id is used again in the turn in which its first request is aborted. The second reader leaves too."""
    seen = right(
        lab, ("open", "a", "r1", 9), ("wait", 0.05), ("leave", "a"), ("open", "b", "r1", 9), ("wait", 0.1),
        ("leave", "b"), ("drain",),
    )  # fmt: skip
    assert seen["tokens computed"] == {"a": 1, "b": 1}
    assert seen["returned"] == {"wait for ever": [], "left in the engine": []}


def test_closed_goes_before_full(lab):
    """All places are taken, and the engine has been closed: the next client gets EngineClosedError."""
    seen = right(
        lab, ("open", "a", "r1", 9, 1), ("wait", 0.15), ("close",), ("wait", 0.1), ("open", "b", "r2", 1),
        max_num_requests=1,
    )  # fmt: skip
    assert seen["clients"] == {"a": "does not read", "b": "EngineClosedError at 0.25 s"}


def test_leaving_a_closed_engine(lab):
    """A reader that leaves when the engine has been closed leaves as any other."""
    seen = right(
        lab, ("open", "a", "r1", 9, 1), ("wait", 0.15), ("close",), ("wait", 0.1), ("leave", "a"), ("drain",)
    )
    assert (seen["clients"], seen["num_requests"]) == ({"a": "left at 0.25 s"}, 0)


# ------------------------------------------------------------------------------------------ together


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS, ids=lambda s: s["name"])
def test_no_reader_waits_for_ever(lab, scenario):
    """In every scenario all readers come to an end, and no rule of the two threads is broken."""
    last = scenarios.run(lab, scenario).steps[-1]
    assert last.returned["wait for ever"] == []
    assert (last.observed["num_requests"], last.observed["faults"]) == (0, [])


def test_random_scripts(lab):
    """Clients that come, stall and leave at random, and an engine that fails: each reads what it should."""
    judge_random_scripts("lab-11", lab)
