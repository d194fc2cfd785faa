"""The demo: several requests that arrive over time, served together from a pool that is too small.

The workload makes it show chunked prefill, a mixed step, a preemption and a prefix-cache hit: one long
prompt, a shared beginning, a late and important request, and little memory.
"""

from collections import deque
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
from mini_engine.outputs import Delta, Stream
from mini_engine.request import Request, SamplingParams
from mini_engine.show.demo_report import Answer, report
from mini_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class DemoRequest:
    prompt: str
    max_tokens: int
    priority: int = 1
    at_step: int = 0
    stop: str = ""
    reads_every: int = 1  # steps between two reads of the stream
    leaves_after: int = 0  # tokens after which the reader closes the stream; 0: never


Workload = list[tuple[DemoRequest, list[int]]]  # each with its prompt's token ids

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
    """Run the demo: serve with a live view, print answers and events, write trace and timeline to `out`.

    `engine_args` are arguments of the Engine; `after_step` is called with it after every step. `explain`
    makes the exception that is raised for an error, from the error and the step (None: no engine yet).
    """
    engine, answers = None, {}
    try:
        engine, workload = demo_engine(model, tokenizer, **engine_args)
        with Live(console=console, refresh_per_second=12, transient=True) as live:
            for answers in serve(engine, workload, temperature):
                if after_step:
                    after_step(engine)
                live.update(_live_view(engine, answers, console.width))
        report(engine.trace, answers, console, out)
        return answers
    except BaseException as error:
        if explain is None or isinstance(error, KeyboardInterrupt):
            raise
        raise explain(error, len(engine.trace.steps) if engine else None) from error


def demo_engine(model: CausalLM, tokenizer: Tokenizer, **engine_args: Any) -> tuple[Engine, Workload]:
    """Return an engine with little enough memory to show everything, and the demo's workload."""
    chat = tokenizer.chat_template is not None
    workload = []
    for request in CHATS if chat else PLAYS:
        prompt = request.prompt
        messages = [{"role": "user", "content": prompt}]
        workload.append((request, tokenizer.encode_chat(messages) if chat else tokenizer.encode(prompt)))
    block_size = 8
    needs = [-(-(len(ids) + request.max_tokens - 1) // block_size) for request, ids in workload]
    engine = Engine(
        model,
        tokenizer,
        policy="priority",
        max_num_batched_tokens=48,
        max_num_seqs=6,
        block_size=block_size,
        # Room for the largest request, but not for half of all: one of them will be preempted.
        # Chats often end before their max_tokens, so they need a smaller pool for it.
        num_blocks=max(max(needs), int(sum(needs) * (0.33 if chat else 0.4))),
        watermark=0,
        **{"record": True, **engine_args},
    )
    return engine, workload


def serve(
    engine: Engine, workload: Workload, temperature: float | None = None
) -> Iterator[dict[str, Answer]]:
    """Serve the workload, each request through a stream; yield the answers so far after every step."""
    if temperature is None:
        temperature = 0.0 if engine.tokenizer and engine.tokenizer.chat_template else 0.7
    readers: dict[str, _Reader] = {}
    pending = sorted(workload, key=lambda item: item[0].at_step)
    now = 0
    with _threads_for(engine.model), _dropped_streams_abort_nothing(engine):
        while pending or engine.has_work:
            while pending and (pending[0][0].at_step <= now or not engine.has_work):
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
                inbox = engine.inboxes.get(name, deque())
                readers[name] = _Reader(request, stream, engine.requests[name], inbox)
            engine.step()
            for reader in readers.values():
                reader.read(now)
            now += 1
            yield {name: reader.answer for name, reader in readers.items()}


class _Reader:
    """Reads one request's stream: after every step, or after some, to its end or not."""

    def __init__(self, wanted: DemoRequest, stream: Stream, request: Request, inbox: deque[Delta]):
        self.wanted, self.stream, self.request, self.inbox = wanted, stream, request, inbox
        self.answer = Answer(wanted.prompt)
        self.unread: list[int] = []  # the steps of the Deltas that were not read yet

    def read(self, step: int) -> None:
        self.unread += [step] * (len(self.inbox) - len(self.unread))
        self.answer.finish_reason = self.request.finish_reason
        if step % self.wanted.reads_every and not self.request.finish_reason:
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
    """After an error, end the requests: a stream that is dropped would ask the broken scheduler to abort."""
    try:
        yield
    except BaseException:
        for request in engine.requests.values():
            request.finish_reason = request.finish_reason or "error"
        raise


@contextmanager
def _threads_for(model: CausalLM) -> Iterator[None]:
    """Use one thread for a small model: a second gains nothing, and costs much on busy cores."""
    threads = torch.get_num_threads()
    if sum(weight.numel() for weight in model.parameters()) < 10_000_000:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
    """Return the end of a text, beginning with a whole word."""
    return text if len(text) <= width else text[-width:].partition(" ")[2]
