"""lab-02's scenarios, and how one is run: prompts in chunks beside decodes, every cut made by the lab."""

import random

from labs.kit import FakeKV, RequestQueue, StepLoop, drive
from mini_engine.scheduler import schedule_step

SETTINGS = ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")


def _requests(*entries):
    return [dict(zip(("id", "prompt", "max_tokens", "at"), entry, strict=False)) for entry in entries]


def _config(budget, slots, blocks, threshold=0):
    return {
        "max_num_batched_tokens": budget,
        "max_num_seqs": slots,
        "long_prefill_token_threshold": threshold,
        "num_blocks": blocks,
    }


def beside_a_chat(threshold: int) -> dict:
    """A prompt of 1,000 tokens comes in while a chat streams; budget 256."""
    return {
        "name": f"an essay beside a chat, threshold {threshold}",
        "config": _config(256, 4, 2048, threshold),
        "requests": _requests(("chat", 8, 44, 0), ("essay", 1000, 2, 3)),
    }


SCENARIOS = [
    {
        "name": "one prompt, three chunks",
        "config": _config(8, 2, 64),
        "requests": _requests(("r0", 20, 4, 0)),
    },
    {
        "name": "the chunks end where the prompt ends",
        "config": _config(8, 2, 64),
        "requests": _requests(("r0", 16, 4, 0)),
    },
    {
        "name": "a long prompt beside two decodes",
        "config": _config(10, 4, 128),
        "requests": _requests(("a", 3, 9, 0), ("b", 4, 9, 0), ("long", 41, 3, 1)),
    },
    {
        "name": "two long prompts and a threshold",
        "config": _config(12, 4, 160, threshold=5),
        "requests": _requests(("chat", 2, 12, 0), ("x", 31, 3, 1), ("y", 17, 3, 1)),
    },
    {
        "name": "chats come and go around an essay",
        "config": _config(8, 4, 200, threshold=3),
        "requests": _requests(("essay", 60, 2, 1), *((f"c{i}", 2, 3, 2 * i) for i in range(12))),
    },
    {
        "name": "one token a prompt",
        "config": _config(4, 4, 64),
        "requests": _requests(*((f"r{i}", 1, 3, 0) for i in range(6))),
    },
]


def draw(seed: int, count: int) -> list[dict]:
    """Scenarios drawn from a seed, with memory for all."""
    rng = random.Random(seed)
    drawn = []
    for number in range(count):
        slots = rng.randint(1, 5)
        requests = _requests(
            *(
                (f"r{i}", rng.randint(1, 40), rng.randint(1, 6), rng.randint(0, 8))
                for i in range(rng.randint(1, 7))
            )
        )
        config = _config(rng.randint(slots, 16), slots, 400, rng.choice((0, 0, 1, 4, 7)))
        drawn.append({"name": f"drawn {seed}.{number}", "config": config, "requests": requests})
    return drawn


def decode_first(lab):
    """A schedule_step with two pools: the decodes get their token, the prompts `lab.prefill_budget`."""

    def step(waiting, running, kv, *, max_num_batched_tokens, max_num_seqs, **settings):
        decodes = [request for request in running if request.is_decode]
        prompts = [request for request in running if not request.is_decode]
        num_prompts = len(prompts)
        left = lab.prefill_budget(running, max_num_batched_tokens)
        for_decodes, places = max_num_batched_tokens - left, max_num_seqs - len(decodes)
        scheduled = schedule_step(
            RequestQueue(), decodes, kv, max_num_batched_tokens=for_decodes, max_num_seqs=0, **settings
        )
        scheduled |= schedule_step(
            waiting, prompts, kv, max_num_batched_tokens=left, max_num_seqs=places, **settings
        )
        running.extend(prompts[num_prompts:])
        order = [request.request_id for request in running]
        return dict(sorted(scheduled.items(), key=lambda row: order.index(row[0])))

    return step


def run(lab, scenario: dict, *, raise_errors: bool = True):
    """The trace of one scenario: `lab.clamp` cuts, `lab.next_chunk` makes the rows."""
    config = scenario["config"]
    kv = FakeKV(config["num_blocks"])
    loop = StepLoop(kv, decode_first(lab), clamp=lab.clamp, **{name: config[name] for name in SETTINGS})
    parts = {"clamp": "lab-02", "next_chunk": "lab-02"}
    return drive(loop, scenario, next_chunk=lab.next_chunk, raise_errors=raise_errors, parts=parts)
