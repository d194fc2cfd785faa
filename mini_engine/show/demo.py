"""The demo: several requests, arriving over time, served at once and out of a pool that is too small.

What it must show (chunked prefill, a mixed step, a preemption, a prefix-cache hit) follows from the
workload: one long prompt, a shared beginning, a late and important request, and little memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mini_engine.engine import Engine, Parts
from mini_engine.request import SamplingParams
from mini_engine.show import figures
from mini_engine.show.tables import print_table
from mini_engine.text.tokenizer import Tokenizer
from mini_engine.trace import Trace, replay, write_trace
from mini_engine.trace.metrics import request_metrics, summary


@dataclass(frozen=True)
class DemoRequest:
    prompt: str
    max_tokens: int
    priority: int = 1
    at_step: int = 0


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


def demo_engine(model, tokenizer: Tokenizer, parts: Parts | None = None, **engine_args) -> tuple:
    """An engine that is tight enough to show everything, and the demo's (DemoRequest, prompt ids)."""
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
        # Room for the largest request, but not for half of them all: someone will have to give way.
        # Chats often end before their max_tokens, so it takes a smaller pool to bring them to that.
        num_blocks=max(max(needs), int(sum(needs) * (0.33 if chat else 0.4))),
        watermark=0,
        parts=parts,
        **engine_args,
    )
    return engine, workload


def run(
    engine: Engine,
    workload: list[tuple[DemoRequest, list[int]]],
    console: Console,
    temperature: float,
    after_step: Callable[[Engine], None] | None = None,
) -> dict[str, str]:
    """Serve the workload with a live view; returns the text of each request."""
    texts: dict[str, str] = {}
    prompts: dict[str, str] = {}
    done: dict[str, str] = {}
    pending = sorted(workload, key=lambda item: item[0].at_step)
    turn = 0
    with Live(console=console, refresh_per_second=12, transient=True) as live:
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


def metrics_table(trace: Trace) -> Table:
    """One row a request, in the field's terms."""
    unit = trace.header["unit"]
    scale, shown = (1e3, "ms") if unit == "s" else (1, unit)

    def time(value: float | None) -> str:
        return "-" if value is None else f"{value * scale:.0f}" if scale > 1 else f"{value:g}"

    table = Table(
        box=box.SIMPLE_HEAD,
        caption=f"prompt, cached of it and output in tokens; queue, prefill, TTFT and TPOT in {shown}",
        caption_justify="left",
        header_style="bold",
        pad_edge=False,
        padding=0,
    )
    columns = "prio prompt cached output queue\nsteps queue prefill TTFT TPOT preemp-\ntions"
    table.add_column("id")
    for name in columns.split(" "):
        table.add_column(name, justify="right")
    table.add_column("end")
    for m in request_metrics(trace).values():
        table.add_row(
            m.id,
            str(m.priority),
            str(m.num_prompt_tokens),
            str(m.num_cached_tokens),
            str(m.num_output_tokens),
            "-" if m.queue_steps is None else str(m.queue_steps),
            *(time(value) for value in (m.queue_time, m.prefill_time, m.ttft, m.tpot)),
            str(m.num_preemptions),
            m.finish_reason or "-",
        )
    return table


def shown(trace: Trace) -> dict[str, bool]:
    """Which of the things that the demo is there to show did happen in this run."""
    events = [event for record in trace.steps for event in record["events"]]
    chunked = mixed = False
    for record, views in replay(trace):
        rows = [views[request_id] for request_id in record["scheduled"]]
        mixed |= {"prefill", "decode"} <= {view.state for view in rows}
        chunked |= any(view.num_scheduled < view.num_new_tokens for view in rows)
    return {
        "chunked prefill": chunked,
        "mixed step": mixed,
        "preemption": any(event["type"] == "PREEMPTED" for event in events),
        "prefix-cache hit": any(event.get("num_cached_tokens") for event in events),
    }


def _headline(trace: Trace) -> str:
    told = summary(trace)
    seen = ", ".join(name for name, happened in shown(trace).items() if happened)
    rate = f"{told.output_throughput:.0f} output tokens/{told.unit}, " if told.output_throughput else ""
    return (
        f"{told.num_completed} requests in {told.num_steps} steps, {rate}KV pool at most "
        f"{told.max_kv_utilisation:.0%} full. Seen: {seen}."
    )


def _live_view(engine: Engine, prompts: dict, texts: dict, done: dict) -> Group:
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


def _print_texts(console: Console, prompts: dict, texts: dict) -> None:
    for request_id, text in texts.items():
        prompt = prompts[request_id]
        if len(prompt) > 300:
            prompt = prompt[:297] + "..."
        shown = Text.assemble((prompt, "dim"), (" " if prompt[-1] in ".?" else ""), (text.rstrip(), "green"))
        row = Table.grid(padding=(0, 1))
        row.add_row(Text(request_id, style="bold"), shown)
        console.print(row)
    console.print()
