"""The demo: several requests, arriving over time, served at once and out of a pool that is too small.

What it must show (chunked prefill, a mixed step, a preemption, a prefix-cache hit) follows from the
workload: one long prompt, a shared beginning, a late and important request, and little memory.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mini_engine.engine import Engine
from mini_engine.model import CausalLM
from mini_engine.outputs import Stream
from mini_engine.request import Request, SamplingParams
from mini_engine.show import figures
from mini_engine.text.tokenizer import Tokenizer
from mini_engine.trace import Trace, replay, write_trace
from mini_engine.trace.file import write_whole
from mini_engine.trace.metrics import request_metrics


@dataclass(frozen=True)
class DemoRequest:
    prompt: str
    max_tokens: int
    priority: int = 1
    at_step: int = 0
    stop: str = ""
    reads_every: int = 1  # steps between two looks at the stream
    leaves_after: int = 0  # tokens after which the reader closes it; 0: it is read to its end


@dataclass
class Answer:
    """What a request was given, and what its reader got: a piece for each of its output tokens."""

    prompt: str
    pieces: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # in which each was made
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


Workload = list[tuple[DemoRequest, list[int]]]  # with the ids of their prompts

_PROLOGUE = (
    "CHORUS:\nTwo households, both alike in dignity,\nIn fair Verona, where we lay our scene,\n"
    "From ancient grudge break to new mutiny,\n"
)
PLAYS = (
    DemoRequest("O Romeo, ", 40),
    DemoRequest(_PROLOGUE + "Where civil blood makes civil hands unclean.\n", 48, priority=2),
    DemoRequest("To be or ", 32, reads_every=5),
    DemoRequest("KING HENRY:\n", 48, priority=2, stop="\n\n"),
    DemoRequest("HAMLET:\nMy lord, ", 24, at_step=6),
    DemoRequest(_PROLOGUE + "JULIET:\n", 32, at_step=14),
    DemoRequest("Enter a MESSENGER.\n", 16, priority=0, at_step=18, stop="\n\n"),
    DemoRequest("My kingdom for ", 40, priority=2, at_step=22),
    DemoRequest("FALSTAFF:\n", 24, at_step=30, leaves_after=18),
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
    DemoRequest("What is 7 plus 5?", 32, at_step=4, stop=". "),
    DemoRequest("Give me a synonym for happy.", 24, at_step=10, reads_every=5),
    DemoRequest("Say hello in Spanish.", 16, priority=0, at_step=14),
    DemoRequest("Why is the sky blue?", 48, priority=2, at_step=18, leaves_after=36),
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
) -> dict[str, Answer]:
    """The whole demo: serve with a live view, print what was said and what happened, write it to `out`.

    `engine_args` go to the Engine, which `after_step` is called with after every step. What goes wrong
    is raised as `explain` puts it, from the error and the step (None: there was no engine yet).
    """
    engine = None
    try:
        engine, workload = demo_engine(model, tokenizer, **engine_args)
        answers = run(engine, workload, console, temperature, after_step)
        report(engine.trace, answers, console, out)
        return answers
    except BaseException as error:
        if explain is None or isinstance(error, KeyboardInterrupt):
            raise
        raise explain(error, len(engine.trace.steps) if engine else None) from error


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
    temperature: float | None = None,
    after_step: Callable[[Engine], None] | None = None,
) -> dict[str, Answer]:
    """Serve the workload with a live view; returns what the reader of each request got."""
    answers: dict[str, Answer] = {}
    with Live(console=console, refresh_per_second=12, transient=True) as live:
        for answers in serve(engine, workload, temperature):
            if after_step:
                after_step(engine)
            live.update(_live_view(engine, answers, console.width))
    return answers


def serve(
    engine: Engine, workload: Workload, temperature: float | None = None
) -> Iterator[dict[str, Answer]]:
    """Serve the workload, each request through a stream; gives the answers so far after every step."""
    if temperature is None:
        temperature = 0.0 if engine.tokenizer and engine.tokenizer.chat_template else 0.7
    readers: dict[str, _Reader] = {}
    pending = sorted(workload, key=lambda item: item[0].at_step)
    turn = 0
    with _threads_for(engine.model), _dropped_streams_abort_nothing(engine):
        while pending or engine.has_work:
            while pending and (pending[0][0].at_step <= turn or not engine.has_work):
                request, ids = pending.pop(0)
                params = SamplingParams(
                    temperature=temperature,
                    top_p=0.95,
                    max_tokens=request.max_tokens,
                    seed=len(readers),
                    stop=request.stop or (),
                )
                name = f"r{len(readers)}"
                stream = engine.stream(ids, params, request_id=name, priority=request.priority)
                readers[name] = _Reader(request, stream, engine.requests[name])
            for delta in engine.step():
                readers[delta.request_id].unread.append(turn)
            for reader in readers.values():
                reader.look(turn)
            turn += 1
            yield {name: reader.answer for name, reader in readers.items()}


class _Reader:
    """Reads one request's stream: at every step, or now and then, or not to the end."""

    def __init__(self, wanted: DemoRequest, stream: Stream, request: Request):
        self.wanted, self.stream, self.request = wanted, stream, request
        self.answer = Answer(wanted.prompt)
        self.unread: list[int] = []  # the steps whose Deltas wait in the inbox

    def look(self, turn: int) -> None:
        self.answer.finish_reason = self.request.finish_reason
        if turn % self.wanted.reads_every and not self.request.finish_reason:
            return
        while self.unread and (delta := next(self.stream, None)):
            self.answer.pieces.append(delta.text)
            self.answer.steps.append(self.unread.pop(0))
            if delta.finish_reason:
                next(self.stream, None)  # reads to the end, as a for loop does
            if len(self.answer.pieces) == self.wanted.leaves_after:
                self.stream.close()
                self.answer.finish_reason = self.request.finish_reason
        self.unread.clear()


@contextmanager
def _dropped_streams_abort_nothing(engine: Engine) -> Iterator[None]:
    """After an error: a scheduler that is broken would be asked to abort, and raise once more."""
    try:
        yield
    except BaseException:
        for request in engine.requests.values():
            request.finish_reason = request.finish_reason or "error"
        raise


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


def report(trace: Trace, answers: dict[str, Answer], console: Console, out: Path) -> None:
    """Print what each request said, what happened, and how to look closer; write what that takes."""
    print_text = partial(console.print, highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    write_trace(out / "trace.jsonl", trace)
    texts = {name: (answer.prompt, answer.pieces) for name, answer in answers.items()}
    write_whole(out / "texts.json", json.dumps(texts))
    import matplotlib

    matplotlib.use("Agg")
    figures.save(figures.timeline(trace), out / "timeline.png", alt=figures.alt_text(trace, "timeline"))
    print_text(f"{count(len(answers), 'request')}, and in green what the model wrote, up to a limit.\n")
    _print_answers(console, answers)
    steps = count(len(trace.steps), "step")
    print_text(f"\nWhat happened in {steps}, each of them one pass through the model for all that run:\n")
    for sentence in happenings(trace).values():
        print_text(Padding(sentence, (0, 0, 0, 2)))
    path = f'"{out / "trace.jsonl"}"' if " " in str(out) else out / "trace.jsonl"
    for what, how in (
        ("Play it, decision by decision:", f"mini-engine trace play {path}"),
        ("Its numbers, a row a request:", f"mini-engine trace summary {path}"),
        ("All of it as one picture:", out / "timeline.png"),
    ):
        print_text(f"\n{what}\n  {how}", soft_wrap=True)


def count(number: int, what: str) -> str:
    """count(1, "step") is "1 step", count(2, "step") is "2 steps"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def listed(items: Iterable[object]) -> str:
    """listed("abc") is "a, b and c"."""
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last


def happenings(trace: Trace) -> dict[str, str]:
    """What did happen in a run of all that the demo is there to show, each in a sentence."""
    cuts: Counter[str] = Counter()  # before the first token: steps that left some of a prompt to the next
    mixed = 0
    for record, views in replay(trace):
        rows = [views[name] for name in record.scheduled]
        mixed += {"prefill", "decode"} <= {view.state for view in rows}
        reading = [view for view in rows if not view.num_output_tokens]
        cuts.update(view.request_id for view in reading if view.num_scheduled < view.num_new_tokens)
    metrics = request_metrics(trace)
    waits = [f"{name} ({count(m.queue_steps, 'step')})" for name, m in metrics.items() if m.queue_steps]
    preempted = [name for name, m in metrics.items() if m.num_preemptions]
    times = count(sum(m.num_preemptions for m in metrics.values()), "preemption")
    found = [
        f"{m.num_cached_tokens} of {m.num_prompt_tokens} prompt tokens of {name}"
        for name, m in metrics.items()
        if m.num_cached_tokens
    ]
    said = {}
    for name, number in cuts.most_common(1):
        said["chunked prefill"] = (
            f"The prompt of {name}, {metrics[name].num_prompt_tokens} tokens long, was read in "
            f"{number + 1} pieces, so that no other answer stood still."
        )
    if mixed:
        said["mixed step"] = f"In {count(mixed, 'step')} prompts were read and answers written at once."
    if waits:
        said["waiting"] = f"{listed(waits)} waited until there was room."
    if preempted:
        said["preemption"] = (
            f"{listed(preempted)} had to give their memory to others ({times}). Each waited, came back, "
            "read its own text again and went on where it had stopped."
        )
    if found:
        said["prefix-cache hit"] = (
            f"{listed(found)} were in the cache, because an earlier request began the same way. "
            "They were not computed again."
        )
    if left := [name for name, m in metrics.items() if m.finish_reason == "abort"]:
        said["abort"] = (
            f"{listed(left)} stopped before the end, because its reader left. That freed its memory at once."
        )
    return said


def _live_view(engine: Engine, answers: dict[str, Answer], width: int) -> Group:
    kv, scheduler = engine.scheduler.kv, engine.scheduler
    running = {request.request_id for request in scheduler.running}
    used = kv.num_blocks - kv.num_free_blocks
    bar = "█" * round(10 * used / kv.num_blocks)
    head = Text(f"{len(running)} running, {len(scheduler.waiting)} waiting, memory {bar:░<10}")
    table = Table.grid(padding=(0, 1))
    for request_id, answer in answers.items():
        request = engine.requests.get(request_id)
        if request is None:
            state, style = "done", "dim"
        elif request_id in running:
            state, style = ("writing", "green") if request.is_decode else ("reading", "blue")
        else:
            state, style = ("preempted", "red") if request.num_preemptions else ("waiting", "yellow")
        tail = _tail((answer.prompt + answer.text).replace("\n", " / "), min(70, width - 14))
        table.add_row(Text(request_id, style="bold"), Text(f"{state:<9}", style=style), Text(tail))
    return Group(head, table)


def _tail(text: str, width: int) -> str:
    """The end of a text, from the beginning of a word on."""
    return text if len(text) <= width else text[-width:].partition(" ")[2]


def _print_answers(console: Console, answers: dict[str, Answer]) -> None:
    for request_id, answer in answers.items():
        prompt = answer.prompt
        if len(prompt) > 300:
            prompt = prompt[:300].rpartition(" ")[0] + " ..."
        shown = Text.assemble(
            (prompt, "dim"), (" " if prompt[-1] in ".?" else ""), (answer.text.rstrip(), "green")
        )
        row = Table.grid(padding=(0, 1))
        row.add_row(Text(request_id, style="bold"), shown)
        console.print(row)
