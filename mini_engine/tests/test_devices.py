"""On a GPU the same tokens come out. Each test runs on the CPU, too: so it is itself tried everywhere."""

import pytest
import torch

from mini_engine.engine import Engine
from mini_engine.tests.helpers import alone, generated, greedy, tiny_model
from mini_engine.trace.records import Preempted

HERE = torch.cuda.is_available()
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not HERE, reason="there is no CUDA device here"))
PROMPTS = [[(7 * i) % 64 for i in range(20)] + [n] * n for n in (1, 5, 9)] + [[3, 1, 4]]
GREEDY = greedy(12)
# Room for two and a half of them, and chunks of a prompt: requests share blocks, are cut, and are preempted.
TIGHT = {"num_blocks": 20, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}


def serve(dtype, device):
    engine = Engine(tiny_model(dtype=dtype).to(device), record=True, **TIGHT)
    return engine, generated(engine, PROMPTS, GREEDY)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_the_tokens_are_those_of_a_request_alone_on_the_cpu(device):
    """Batched, in chunks, preempted, with shared blocks: in float64, where no near tie can hide an error."""
    engine, tokens = serve("float64", device)
    model = tiny_model()
    assert tokens == [alone(model, prompt, GREEDY) for prompt in PROMPTS]
    events = [event for step in engine.trace.steps for event in step.events]
    assert engine.scheduler.kv.stats.hits > 0 and any(isinstance(event, Preempted) for event in events)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_precision_serves_to_the_end_and_repeats(dtype, device):
    first, again = serve(dtype, device)[1], serve(dtype, device)[1]
    assert first == again
    assert [len(row) for row in first] == [12] * len(PROMPTS)
