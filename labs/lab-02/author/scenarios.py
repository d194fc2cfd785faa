"""lab-02's scenarios, and how one is run: `clamp` decides how large a chunk is, `next_chunk` cuts it."""

from labs.kit import FakeKV, RequestQueue, StepLoop, drive
from labs.kit.toys.workloads import workload
from mini_engine.scheduler import schedule_step

SETTINGS = ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")


def beside_a_chat(threshold: int) -> dict:
    """A prompt of 1,000 tokens comes in while a chat streams; budget 256."""
    name = f"an essay beside a chat, threshold {threshold}"
    requests = [("chat", 8, 44, 0), ("essay", 1000, 2, 3)]
    return workload(name, requests, budget=256, blocks=2048, threshold=threshold)


_LONG = [("a", 3, 9, 0), ("b", 4, 9, 0), ("long", 41, 3, 1)]
_TWO_LONG = [("chat", 2, 12, 0), ("x", 31, 3, 1), ("y", 17, 3, 1)]
_CHATS = [("essay", 60, 2, 1), *((f"c{i}", 2, 3, 2 * i) for i in range(12))]

SCENARIOS = [
    workload("one prompt, three chunks", [("r0", 20, 4, 0)], budget=8, slots=2),
    workload("the chunks end where the prompt ends", [("r0", 16, 4, 0)], budget=8, slots=2),
    workload("a long prompt beside two decodes", _LONG, budget=10, blocks=128),
    workload("two long prompts and a threshold", _TWO_LONG, budget=12, blocks=160, threshold=5),
    workload("chats come and go around an essay", _CHATS, budget=8, blocks=200, threshold=3),
    workload("one token a prompt", [(f"r{i}", 1, 3, 0) for i in range(6)], budget=4),
]


def decode_first(lab):
    """A schedule_step with two pools: the decodes get their token, the prompts `lab.prefill_budget`."""

    def step(waiting, running, kv, *, max_num_batched_tokens, max_num_seqs, **settings):
        decodes = [request for request in running if request.is_decode]
        prompts = [request for request in running if not request.is_decode]
        num_prompts = len(prompts)
        left = lab.prefill_budget(running, max_num_batched_tokens)
        used = settings | {"max_num_batched_tokens": max_num_batched_tokens - left, "max_num_seqs": 0}
        free = settings | {"max_num_batched_tokens": left, "max_num_seqs": max_num_seqs - len(decodes)}
        scheduled = schedule_step(RequestQueue(), decodes, kv, **used)
        scheduled |= schedule_step(waiting, prompts, kv, **free)
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
