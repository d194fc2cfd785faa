"""A run small enough to understand step by step: 20 blocks and six requests, without a model.

The real Scheduler and BlockManager decide; only the tokens are made up. It shows a chunked prefill,
mixed steps, a prefix hit, full slots, and a preemption with its resumption.
"""

from typing import Any

from mini_engine.block_manager import BlockManager
from mini_engine.request import Request, SamplingParams
from mini_engine.scheduler import Scheduler
from mini_engine.trace import Recorder, Trace

# (id, prompt tokens, max_tokens, arrives before this step). r3 starts with r0's first 16 tokens,
# as two questions about the same document do.
REQUESTS = (
    ("r0", 20, 16, 0), ("r1", 9, 14, 0), ("r2", 9, 12, 2),
    ("r3", 21, 9, 5), ("r4", 10, 10, 7), ("r5", 8, 4, 8),
)  # fmt: skip
SHARED = 16


def ready_setup() -> Trace:
    """Return the example's trace, in virtual time that counts steps."""
    coming = []
    for n, (request_id, num_prompt, max_tokens, step) in enumerate(REQUESTS):
        prompt = [100 * n + position for position in range(num_prompt)]
        if request_id == "r3":
            prompt[:SHARED] = range(SHARED)
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        coming.append((step, Request(request_id, prompt, params)))
    limits: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    kv = BlockManager(num_blocks=20, block_size=4)
    recorder = Recorder(Scheduler(kv, **limits, long_prefill_token_threshold=8))
    while coming or recorder.has_work:
        while coming and coming[0][0] <= recorder.step:
            recorder.add(coming.pop(0)[1])
        scheduled = recorder.schedule()
        ends = [r for r in recorder.running if scheduled.get(r.request_id) == r.num_new_tokens]
        recorder.update(scheduled, {r.request_id: [1000 + r.num_tokens] for r in ends})  # made-up tokens
    return recorder.close("drained")
