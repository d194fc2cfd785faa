"""The benchmark is fair: turns are taken, every round starts cold, and tokens are compared."""

import pytest

from mini_engine.bench import race
from mini_engine.bench.contestants import MiniEngine, Transformers
from mini_engine.bench.race import Workload
from mini_engine.loading.registry import resolve


def test_workload_is_what_it_says_and_repeats():
    load, again = Workload.mixed(1000), Workload.mixed(1000)
    assert load == again and len(load.prompts) == 32
    assert all(16 <= len(prompt) <= 256 for prompt in load.prompts)
    assert set(load.num_outputs) == {16, 32, 64, 128}


def test_contestants_take_turns_after_a_warm_up():
    calls = []
    load = Workload([[1, 2]], [1])
    contestants = {name: lambda load, name=name: calls.append(name) or [[7]] for name in ("a", "b")}
    reported = []
    result = race.run(contestants, load, rounds=2, report=reported.append)
    assert calls == ["a", "b"] * 3
    assert [line.partition(":")[0] for line in reported[::2]] == ["warm-up", "round 1 of 2", "round 2 of 2"]
    assert [line.split(": ")[1][0] for line in reported] == calls
    assert len(result.seconds["a"]) == 2 and result.num_equal("a", "b") == 1


def test_table_shows_median_ratio_spread_and_equal_tokens():
    seconds = {"mini-engine": [1.0, 2.0, 4.0], "transformers": [3.0, 4.0, 20.0]}
    result = race.Result(seconds, {"mini-engine": [[1], [2]], "transformers": [[1], [3]]}, 100)
    assert result.ratios("mini-engine", "transformers") == [3.0, 2.0, 5.0]
    assert result.rate("mini-engine") == 50.0
    caption = race.table(result).caption
    assert "3.00 times as fast (2.00 to 5.00 over 3 rounds)" in caption
    assert "tokens equal in 1 of 2 requests" in caption


def test_a_dtype_that_may_differ_between_the_two_is_refused():
    pytest.importorskip("transformers", reason="the oracle is in the extra `dev`")
    with pytest.raises(ValueError, match="dtype must be float32, .* but is 'auto'"):
        Transformers(resolve("shakespeare"), "auto")


def test_both_contestants_give_the_same_tokens_on_the_embedded_model():
    pytest.importorskip("transformers", reason="the oracle is in the extra `dev`")
    path = resolve("shakespeare")
    ours, theirs = MiniEngine(path), Transformers(path)
    load = Workload([[5, 6, 7], [8, 9, 10, 11, 12], [3]], [4, 9, 2])
    assert ours(load) == theirs(load)
    assert [len(tokens) for tokens in ours(load)] == load.num_outputs
