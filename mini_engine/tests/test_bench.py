"""The benchmark is fair: turns are taken, every round starts cold, and tokens are compared."""

import pytest

from mini_engine import bench
from mini_engine.loading.registry import resolve


def test_workload_is_what_it_says_and_repeats():
    load, again = bench.Workload.mixed(1000), bench.Workload.mixed(1000)
    assert load == again and len(load.prompts) == 32
    assert all(16 <= len(prompt) <= 256 for prompt in load.prompts)
    assert set(load.num_outputs) == {16, 32, 64, 128}


def test_contestants_take_turns_after_a_warm_up():
    calls = []
    load = bench.Workload([[1, 2]], [1])
    contestants = {name: lambda load, name=name: calls.append(name) or [[7]] for name in ("a", "b")}
    told = []
    result = bench.run(contestants, load, rounds=2, tell=told.append)
    assert calls == ["a", "b"] * 3
    assert [line.partition(":")[0] for line in told[::2]] == ["warm-up", "round 1 of 2", "round 2 of 2"]
    assert [line.split(": ")[1][0] for line in told] == calls
    assert len(result.seconds["a"]) == 2 and result.num_equal("a", "b") == 1


def test_table_tells_median_ratio_spread_and_equal_tokens():
    seconds = {"mini-engine": [1.0, 2.0, 4.0], "transformers": [3.0, 4.0, 20.0]}
    result = bench.Result(seconds, {"mini-engine": [[1], [2]], "transformers": [[1], [3]]}, 100)
    assert result.ratios("mini-engine", "transformers") == [3.0, 2.0, 5.0]
    assert result.rate("mini-engine") == 50.0
    caption = bench.table(result).caption
    assert "3.00 times as fast (2.00 to 5.00 over 3 rounds)" in caption
    assert "tokens equal in 1 of 2 requests" in caption


def test_a_dtype_that_may_differ_between_the_two_is_refused():
    pytest.importorskip("transformers", reason="the oracle is in the extra `dev`")
    with pytest.raises(ValueError, match="dtype must be float32, .* but is 'auto'"):
        bench.transformers_contestant(resolve("shakespeare"), "auto")


def test_both_contestants_give_the_same_tokens_on_the_embedded_model():
    pytest.importorskip("transformers", reason="the oracle is in the extra `dev`")
    path = resolve("shakespeare")
    ours, theirs = bench.mini_engine_contestant(path), bench.transformers_contestant(path)
    load = bench.Workload([[5, 6, 7], [8, 9, 10, 11, 12], [3]], [4, 9, 2])
    assert ours(load) == theirs(load)
    assert [len(tokens) for tokens in ours(load)] == load.num_outputs
