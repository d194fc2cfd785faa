"""The demo: several requests, arriving over time, served at once and out of a pool that is too small.

What it must show (chunked prefill, a mixed step, a preemption, a prefix-cache hit) follows from the
workload: one long prompt, a shared beginning, a late and important request, and little memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mini_engine.engine import Engine
from mini_engine.model import CausalLM
from mini_engine.request import SamplingParams
from mini_engine.show import figures
from mini_engine.show.tables import metrics_table, print_table
from mini_engine.text.tokenizer import Tokenizer
from mini_engine.trace import Preempted, Scheduled, Trace, replay, write_trace
from mini_engine.trace.metrics import summary


@dataclass(frozen=True)
class DemoRequest:
    prompt: str
    max_tokens: int
    priority: int = 1
    at_step: int = 0


Workload = list[tuple[DemoRequest, list[int]]]  # with the ids of their prompts

_PROLOGUE = (
    "CHORUS:\nTwo households, both alike in dignity,\nIn fair Verona, where we lay our scene,\n"
    "From ancient grudge break to new mutiny,\n"
)
PLAYS = (
    DemoRequest("O Romeo, ", 40),
    DemoRequest(_PROLOGUE + "Where civil blood makes civil hands unclean.\n", 48, priority=2),
    DemoRequest("To be or ", 32),
    DemoRequest("KING HENRY:\n", 48, priority=2),
    DemoRequest("HAMLET:\nMy lord, ", 24, at_step=6),
    DemoRequest(_PROLOGUE + "JULIET:\n", 32, at_step=14),
    DemoRequest("Enter a MESSENGER.\n", 16, priority=0, at_step=18),
    DemoRequest("My kingdom for ", 40, priority=2, at_step=22),
    DemoRequest("FALSTAFF:\n", 24, at_step=30),
)
_STORY = (
    "Summarize this story in one sentence. A ship's cook named Ana found a map in an old barrel of flour. "
    "She showed it to the captain, who laughed, and to the cabin boy, who did not. That night the two of "
    "them rowed to a small island, dug where the map was marked, and found a second barrel of flour. "
    "Inside it was a letter which said that the best treasure on any ship is the person who bakes the bread."
)
CHATS = (
    DemoRequest("What is the capital of France?", 24),
    DemoRequest(_STORY, 48, priority=2),
    DemoRequest("Name three primary colors.", 32),
    DemoRequest("Write a short poem about the sea.", 64, priority=2),
    DemoRequest("What is 7 plus 5?", 32, at_step=4),
    DemoRequest("Give me a synonym for happy.", 24, at_step=10),
    DemoRequest("Say hello in Spanish.", 16, priority=0, at_step=14),
    DemoRequest("Why is the sky blue?", 48, priority=2, at_step=18),
    DemoRequest("Name a fruit that is yellow.", 24, at_step=24),
)


def run_demo(
    model: CausalLM,
    tokenizer: Tokenizer,
    console: Console,
    out: Path,
    temperature: float | None = None,
    *,
    after_step: Callable[[Engine], None] | None = None,
    explain: Callable[[BaseException, int | None], Exception] | None = None,
    **engine_args: Any,
) -> None:
    """The whole demo: serve with a live view, print texts and metrics, write trace.jsonl and timeline.png.

    `engine_args` go to the Engine, which `after_step` is called with after every step. What goes wrong
    is raised as `explain` puts it, from the error and the step (None: there was no engine yet).
    """
    engine = None
    try:
        engine, workload = demo_engine(model, tokenizer, **engine_args)
        if temperature is None:
            temperature = 0.0 if tokenizer.chat_template else 0.7
        run(engine, workload, console, temperature, after_step)
        paths = report(engine.trace, console, out)
    except BaseException as error:
        if explain is None or isinstance(error, KeyboardInterrupt):
            raise
        raise explain(error, len(engine.trace.steps) if engine else None) from error
    for path in paths:
        console.print(f"wrote {path}", soft_wrap=True)


def demo_engine(model: CausalLM, tokenizer: Tokenizer, **engine_args: Any) -> tuple[Engine, Workload]:
    """An engine that is tight enough to show everything, and the demo's requests with their prompt ids."""
    chat = tokenizer.chat_template is not None
    workload = []
    for request in CHATS if chat else PLAYS:
        if chat:
            ids = tokenizer.encode_chat([{"role": "user", "content": request.prompt}])
        else:
            ids = tokenizer.encode(request.prompt)
        workload.append((request, ids))
    block_size = 8
    needs = [-(-(len(ids) + request.max_tokens - 1) // block_size) for request, ids in workload]
    engine = Engine(
        model,
        tokenizer,
        policy="priority",
        max_num_batched_tokens=48,
        max_num_seqs=6,
        block_size=block_size,
        # Room for the largest request, but not for half of them all: one will have to give way.
        # Chats often end before their max_tokens, so it takes a smaller pool to bring them to that.
        num_blocks=max(max(needs), int(sum(needs) * (0.33 if chat else 0.4))),
        watermark=0,
        **{"record": True, **engine_args},
    )
    return engine, workload


def run(
    engine: Engine,
    workload: Workload,
    console: Console,
    temperature: float,
    after_step: Callable[[Engine], None] | None = None,
) -> dict[str, str]:
    """Serve the workload with a live view, and print it; returns the text of each request."""
    texts: dict[str, str] = {}
    prompts: dict[str, str] = {}
    done: dict[str, str] = {}
    pending = sorted(workload, key=lambda item: item[0].at_step)
    turn = 0
    with _threads_for(engine.model), Live(console=console, refresh_per_second=12, transient=True) as live:
        while pending or engine.has_work:
            while pending and (pending[0][0].at_step <= turn or not engine.has_work):
                request, ids = pending.pop(0)
                params = SamplingParams(
                    temperature=temperature, top_p=0.95, max_tokens=request.max_tokens, seed=len(texts)
                )
                request_id = engine.add_request(ids, params, priority=request.priority)
                texts[request_id], prompts[request_id] = "", request.prompt
            for delta in engine.step():
                texts[delta.request_id] += delta.text
                if delta.finish_reason:
                    done[delta.request_id] = delta.finish_reason
            if after_step:
                after_step(engine)
            turn += 1
            live.update(_live_view(engine, prompts, texts, done))
    _print_texts(console, prompts, texts)
    return texts


@contextmanager
def _threads_for(model: CausalLM) -> Iterator[None]:
    """One thread for a small model: a second gains it nothing, and costs much where the cores are busy."""
    threads = torch.get_num_threads()
    if sum(weight.numel() for weight in model.parameters()) < 10_000_000:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def report(trace: Trace, console: Console, out: Path) -> list[Path]:
    """Print the metrics and write trace.jsonl and timeline.png; returns their paths."""
    print_table(metrics_table(trace), console)
    console.print(_headline(trace))
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "trace.jsonl", out / "timeline.png"]
    write_trace(paths[0], trace)
    import matplotlib

    matplotlib.use("Agg")
    figures.save(figures.timeline(trace), paths[1], alt=figures.alt_text(trace, "timeline"))
    return paths


def shown(trace: Trace) -> dict[str, bool]:
    """Which of the things that the demo is there to show did happen in this run."""
    events = [event for record in trace.steps for event in record.events]
    chunked = mixed = False
    for record, views in replay(trace):
        rows = [views[request_id] for request_id in record.scheduled]
        mixed |= {"prefill", "decode"} <= {view.state for view in rows}
        chunked |= any(view.num_scheduled < view.num_new_tokens for view in rows)
    return {
        "chunked prefill": chunked,
        "mixed step": mixed,
        "preemption": any(isinstance(event, Preempted) for event in events),
        "prefix-cache hit": any(isinstance(event, Scheduled) and event.num_cached_tokens for event in events),
    }


def _headline(trace: Trace) -> str:
    total = summary(trace)
    seen = ", ".join(name for name, happened in shown(trace).items() if happened)
    rate = f"{total.output_throughput:.0f} output tokens/{total.unit}, " if total.output_throughput else ""
    return (
        f"{total.num_completed} requests in {total.num_steps} steps, {rate}KV pool at most "
        f"{total.max_kv_utilisation:.0%} full. Seen: {seen}."
    )


def _live_view(engine: Engine, prompts: dict[str, str], texts: dict[str, str], done: dict[str, str]) -> Group:
    kv, scheduler = engine.scheduler.kv, engine.scheduler
    running = {request.request_id for request in scheduler.running}
    used = kv.num_blocks - kv.num_free_blocks
    bar = "█" * round(20 * used / kv.num_blocks)
    head = Text(
        f"running {len(scheduler.running)}  waiting {len(scheduler.waiting)}  "
        f"KV {bar:░<20} {used}/{kv.num_blocks} blocks"
    )
    table = Table.grid(padding=(0, 1))
    for request_id, text in texts.items():
        request = engine.requests.get(request_id)
        if request is None:
            state, style = done.get(request_id, "?"), "dim"
        elif request_id in running:
            state, style = ("decode", "green") if request.is_decode else ("prefill", "blue")
        else:
            state, style = ("preempted", "red") if request.num_preemptions else ("waiting", "yellow")
        tail = (prompts[request_id] + text).replace("\n", " / ")[-70:]
        table.add_row(Text(request_id, style="bold"), Text(f"{state:<9}", style=style), Text(tail))
    return Group(head, table)


def _print_texts(console: Console, prompts: dict[str, str], texts: dict[str, str]) -> None:
    for request_id, text in texts.items():
        prompt = prompts[request_id]
        if len(prompt) > 300:
            prompt = prompt[:297] + "..."
        shown = Text.assemble((prompt, "dim"), (" " if prompt[-1] in ".?" else ""), (text.rstrip(), "green"))
        row = Table.grid(padding=(0, 1))
        row.add_row(Text(request_id, style="bold"), shown)
        console.print(row)
    console.print()
