"""The figures and the table of docs/watch-the-real-one.md: vLLM's decisions beside ours.

python docs/images/watch.py     draws docs/images/watch/*.svg, and prints the rows of the table

vLLM's side was recorded by `mini-engine trace record-vllm NAME -o docs/examples/vllm/NAME.jsonl`.
"""

from functools import cache
from itertools import zip_longest
from pathlib import Path

from mini_engine.show.player.picture import step_picture
from mini_engine.sim import scenarios
from mini_engine.trace import Preempted, Trace, decisions, first_difference, read_trace

HERE = Path(__file__).parent
RECORDINGS, FOLDER = HERE.parent / "examples" / "vllm", HERE / "watch"
NAMES = ("vLLM 0.32.0", "ours")
WORDS = {
    "scheduled": "scheduled requests", "num_batched_tokens": "tokens", "num_running": "running",
    "num_waiting": "waiting", "num_free_blocks": "free blocks", "new_tokens": "new tokens",
    "events": "events",
}  # fmt: skip


@cache
def runs(name: str) -> tuple[Trace, Trace]:
    """The recorded run of vLLM, and ours with the same requests, settings and tokens."""
    recorded = read_trace(RECORDINGS / f"{name}.jsonl")
    return recorded, scenarios.ours(scenarios.find(name), recorded)


def parts_at(name: str) -> int | None:
    """The first step in which another request, or another number of its tokens, is computed."""
    steps = enumerate(zip_longest(*([list(r.scheduled.items()) for r in run.steps] for run in runs(name))))
    return next((step for step, (theirs, own) in steps if theirs != own), None)


def row(name: str) -> str:
    """A scenario's row in the table: steps of both, where they first differ and in what, where rows do."""
    vllm, ours = runs(name)
    first, rows = first_difference(vllm, ours), parts_at(name)
    differs = "never"
    if first is not None:
        theirs, own = decisions(vllm.steps[first]), decisions(ours.steps[first])
        differs = f"step {first}: {', '.join(word for key, word in WORDS.items() if theirs[key] != own[key])}"
    computes = "never" if rows is None else f"step {rows}"
    return f"| [{name}](#{name}) | {len(vllm.steps)}, {len(ours.steps)} | {differs} | {computes} |"


def place(name: str) -> int:
    """The step to look at: where the rows differ, else where one is preempted, else the first difference."""
    preempts = (r.step for r in runs(name)[0].steps for e in r.events if isinstance(e, Preempted))
    places = (parts_at(name), next(preempts, None), first_difference(*runs(name)), 0)
    return next(place for place in places if place is not None)


def picture(name: str) -> str:
    vllm, ours = runs(name)
    return step_picture(vllm, place(name), ours, names=NAMES)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in scenarios.named():
        print(row(each))
        (FOLDER / f"{each}.svg").write_text(picture(each) + "\n", encoding="utf-8")
