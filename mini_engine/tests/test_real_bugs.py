"""Cases that real engines got wrong, each by the number of its public issue; docs/real-bugs.md has them.

A test fails if the engine here did the same.
"""

import pytest

from mini_engine.block_manager import BlockManager
from mini_engine.invariants import watch
from mini_engine.tests.helpers import SlotEngine, make_request


def decoding(engine):
    return [r.request_id for r in engine.scheduler.running if r.is_decode]


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_prompt_that_is_cached_whole(size):
    """nano-vLLM 114, 144, 199: a prompt of whole blocks comes again, and has a block left to compute."""
    engine = SlotEngine(num_blocks=12, block_size=size)
    prompt = list(range(4)) * size
    engine.add(make_request("a", prompt[: 2 * size], 1)).run()
    engine.add(make_request("b", prompt[: 2 * size], 2))
    assert engine.step() == {"b": size}
    engine.run()


def test_counted_after_the_cache_was_asked():
    """nano-vLLM 207, 210, 211, 233: what is scheduled at admission is what the cache has left."""
    engine = SlotEngine(num_blocks=12, block_size=4)
    engine.add(make_request("a", [1] * 9, 9)).step()
    engine.add(make_request("b", [1] * 9, 9))
    assert engine.step() == {"a": 1, "b": 1}
    engine.scheduler.preempt(engine.requests["b"])
    assert engine.step() == {"a": 1, "b": 2}, "its outputs too, less what its own blocks still hold"
    engine.run()


def test_nothing_is_found_before_it_is_computed():
    """nano-vLLM 208, 209, 219: two alike in one step; chunks too are found when they are computed."""
    engine = SlotEngine(num_blocks=12, block_size=4, max_num_batched_tokens=20)
    engine.add(make_request("a", [1] * 9, 3), make_request("b", [1] * 9, 3))
    assert engine.step() == {"a": 9, "b": 9}
    engine.run()
    engine = SlotEngine(num_blocks=12, block_size=4, long_prefill_token_threshold=4)
    engine.add(make_request("a", [1] * 9, 3)).step()
    engine.add(make_request("b", [1] * 9, 3))
    assert engine.step() == {"a": 4, "b": 4}
    assert engine.requests["b"].num_cached_tokens == 4
    engine.run()


def test_a_name_goes_with_its_block():
    """nano-vLLM 163: a block that is taken for another text is no longer found under the old one."""
    engine = SlotEngine(num_blocks=3, block_size=4)
    engine.add(make_request("a", [1] * 9, 1)).run()
    engine.add(make_request("b", [2] * 9, 1)).run()
    assert engine.kv.get_computed_blocks(make_request("again", [1] * 9)) == []


def test_those_that_run_take_slots():
    """nano-vLLM 271: slots are counted over all that run, not over those that this step admits."""
    engine = SlotEngine(max_num_seqs=2).add(*(make_request(name, 1, 5) for name in "ab"))
    engine.step()
    engine.add(make_request("c", 4))
    assert engine.step() == {"a": 1, "b": 1}
    engine.run()


def test_what_can_never_finish_is_refused():
    """nano-vLLM 274, 277, vLLM 1534, 39734: larger than the pool: refused by name; others are served."""
    engine = SlotEngine(num_blocks=4, block_size=4).add(make_request("small", 2, 3))
    with pytest.raises(ValueError, match="'huge'.*pool holds 16"):
        engine.add(make_request("huge", 12, 12))
    engine.run()


def test_decodes_go_on_while_prompts_come():
    """sglang 32549: as long as prompts keep coming, a stream still gets a token in every step."""
    engine = SlotEngine(num_blocks=200, max_num_batched_tokens=16).add(make_request("chat", 3, 12))
    for number in range(12):
        engine.add(make_request(f"doc{number}", 12, 1)).step()
    assert len(engine.requests["chat"].output_token_ids) == 12


def test_outputs_survive_preemption():
    """sglang 20724: a stream never has a token twice; logprobs and tokens stay of one length."""
    engine = SlotEngine(num_blocks=4, block_size=3).add(make_request("a", 5, 6), make_request("b", 5, 6))
    while not engine.preemptions:
        outputs = list(engine.requests["b"].output_token_ids)
        engine.step()
    assert engine.requests["b"].output_token_ids == outputs != []
    engine.run()


def test_a_victim_is_not_in_the_schedule():
    """vLLM 23347, 49097: the least important stands first in the rows, and is preempted in this step."""
    engine = SlotEngine(num_blocks=9, block_size=1, policy="priority", max_num_seqs=2)
    engine.add(make_request("low", 3, 5, priority=9)).step()
    engine.add(make_request("high", 3, 5))
    with watch(engine.scheduler):
        while not engine.preemptions:
            scheduled = engine.step()
    assert (engine.preemptions, scheduled) == (["low"], {"high": 1})
    engine.run()


def test_memory_is_taken_when_it_is_promised():
    """vLLM 21793: two prompts of 15 in 20 slots: the second waits, and neither loses its work."""
    engine = SlotEngine(num_blocks=20, block_size=1, max_num_batched_tokens=4, max_num_seqs=2)
    assert engine.add(make_request("a", 15, 5), make_request("b", 15, 5)).run().preemptions == []


@pytest.mark.parametrize("threshold", [0, 1, 4, 5000])
def test_a_prompt_that_is_longer_than_a_step(threshold):
    """sglang 36344: 129 tokens in steps of 128, alone, whatever the threshold: it ends."""
    engine = SlotEngine(num_blocks=80, max_num_batched_tokens=128, long_prefill_token_threshold=threshold)
    engine.add(make_request("a", 129, 2)).run()


def test_freed_twice_is_freed_once():
    """mini-sglang 111: aborted in the moment in which it finishes; no block has two owners."""
    kv = BlockManager(6, 4)
    a, b, c = (make_request(name, 8) for name in "abc")
    assert kv.admit(a)
    kv.free(a)
    kv.free(a)
    kv.check()
    assert kv.admit(b) and kv.admit(c)
    assert not set(kv.block_table(b)) & set(kv.block_table(c))
    engine = SlotEngine().add(make_request("a", 4, 1), make_request("b", 4, 3))
    scheduled = engine.recorder.schedule()
    assert engine.abort("a")
    assert engine.recorder.update(scheduled, {"a": [1], "b": [2]}) == []
    assert not engine.abort("a")
    assert engine.kv.num_free_blocks == engine.kv.num_blocks - 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_when_a_new_block_is_taken(size):
    """nano-vLLM 30, 150, 240, 65, 66, 71, which is none: the token behind a full block opens the next."""
    engine = SlotEngine(num_blocks=20, block_size=size).add(make_request("a", 2 * size, 4 * size))
    while engine.scheduler.has_work:
        request = engine.requests["a"]
        engine.step()
        if request.finish_reason is None:
            computed = request.num_tokens - 1  # the newest is sampled, and not computed
            assert len(engine.kv.block_table(request)) == -(-computed // size)
    engine.check_drained()
