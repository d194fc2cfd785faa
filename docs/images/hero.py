"""Records docs/images/hero.jsonl, the run on the front page: the engine serves six chats with the embedded
model, in a pool of blocks that is too small for all of them.

python docs/images/hero.py [OUT.jsonl]
"""

import sys
from pathlib import Path

from mini_engine.engine import Engine
from mini_engine.loading.checkpoint import load
from mini_engine.request import SamplingParams
from mini_engine.sim.cost_model import CostModel
from mini_engine.trace import Trace, VirtualClock, write_trace

RECORDING = Path(__file__).with_name("hero.jsonl")
# (prompt, seed, letters to write, step of its arrival). The seeds' texts end with a sentence.
CHATS = (
    ("ROMEO:\nI love ", 17, 82, 0),
    ("KING LEAR:\nBlow, winds, ", 10, 80, 2),
    ("JULIET:\nGood night, ", 13, 98, 4),
    ("HAMLET:\nTo be, or ", 2, 100, 6),
    ("PUCK:\nWhat fools ", 0, 107, 8),
    ("FIRST WITCH:\nWhen shall we ", 3, 94, 10),
)
# The pool has room for all six until step 64. One of them has to wait from then on.
SETTINGS = {"num_blocks": 32, "block_size": 16, "max_num_seqs": 6, "max_num_batched_tokens": 32}


def record() -> Trace:
    """Serve the chats, named 1 to 6, and return the trace, in the milliseconds of the cost model."""
    engine = Engine(
        *load("shakespeare", "float32", "cpu"),
        record=True,
        clock=VirtualClock(CostModel().clock(), unit="ms"),
        enable_prefix_caching=False,
        watermark=0,
        fast=False,
        **SETTINGS,
    )
    coming, now = list(enumerate(CHATS, 1)), 0
    while coming or engine.has_work:
        while coming and coming[0][1][3] <= now:
            name, (prompt, seed, letters, _) = coming.pop(0)
            params = SamplingParams(temperature=0.7, top_p=0.9, seed=seed, max_tokens=letters)
            engine.add_request(prompt, params, request_id=str(name))
        engine.step()
        now += 1
    return engine.trace


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDING
    write_trace(out, record())
    print(f"{out}: {out.stat().st_size / 1000:.0f} kB")
