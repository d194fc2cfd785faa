"""The demo's report: the answers, the events in sentences, and the files to look closer."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mini_engine.show import figures
from mini_engine.show.figures import counted
from mini_engine.trace import Trace, replay, write_trace
from mini_engine.trace.file import write_whole
from mini_engine.trace.metrics import request_metrics


@dataclass
class Answer:
    """A request's prompt, and what its reader received: a piece of text for each output token."""

    prompt: str
    pieces: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # in which each was sampled
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def report(trace: Trace, answers: dict[str, Answer], console: Console, out: Path) -> None:
    """Print the answers, what happened, and how to look closer; write the files for that."""
    print_text = partial(console.print, highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    write_trace(out / "trace.jsonl", trace)
    texts = {name: (answer.prompt, answer.pieces) for name, answer in answers.items()}
    write_whole(out / "texts.json", json.dumps(texts))
    import matplotlib

    matplotlib.use("Agg")
    figures.save(figures.timeline(trace), out / "timeline.png", alt=figures.alt_text(trace, "timeline"))
    number = counted(len(answers), "request")
    print_text(f"{number}; the text of the model is green, and its length is limited.\n")
    _print_answers(console, answers)
    steps = counted(len(trace.steps), "step")
    print_text(f"\nWhat happened in {steps}, each one pass of the model for all running requests:\n")
    for sentence in highlights(trace).values():
        print_text(Padding(sentence, (0, 0, 0, 2)))
    path = f'"{out / "trace.jsonl"}"' if " " in str(out) else out / "trace.jsonl"
    for what, how in (
        ("Play it, decision by decision:", f"mini-engine trace play {path}"),
        ("Its numbers, a row per request:", f"mini-engine trace summary {path}"),
        ("The whole run as one picture:", out / "timeline.png"),
    ):
        print_text(f"\n{what}\n  {how}", soft_wrap=True)


def listed(items: Iterable[object]) -> str:
    """Return the items in a sentence: "a, b and c"."""
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last


def highlights(trace: Trace) -> dict[str, str]:
    """Return the events that the demo is meant to show, as far as they occurred, each in a sentence."""
    cuts: Counter[str] = Counter()  # steps before the first token that left a part of the prompt
    mixed = 0
    for record, views in replay(trace):
        rows = [views[name] for name in record.scheduled]
        mixed += {"prefill", "decode"} <= {view.state for view in rows}
        reading = [view for view in rows if not view.num_output_tokens]
        cuts.update(view.request_id for view in reading if view.num_scheduled < view.num_new_tokens)
    metrics = request_metrics(trace)
    waits = [f"{name} ({counted(m.queue_steps, 'step')})" for name, m in metrics.items() if m.queue_steps]
    preempted = [name for name, m in metrics.items() if m.num_preemptions]
    times = counted(sum(m.num_preemptions for m in metrics.values()), "preemption")
    hits = {name: m for name, m in metrics.items() if m.num_cached_tokens}
    found = [f"{m.num_cached_tokens} of {m.num_prompt_tokens} prompt tokens of {i}" for i, m in hits.items()]
    said = {}
    for name, number in cuts.most_common(1):
        said["chunked prefill"] = (
            f"The prompt of {name}, {metrics[name].num_prompt_tokens} tokens long, was read in "
            f"{number + 1} pieces, so that the other answers went on meanwhile."
        )
    if mixed:
        said["mixed step"] = f"In {counted(mixed, 'step')} prompts were read while answers were written."
    if waits:
        said["waiting"] = f"{listed(waits)} waited until there was room."
    if preempted:
        said["preemption"] = (
            f"{listed(preempted)} lost memory to other requests ({times}). After a wait each read its own "
            "text again and went on where it had stopped."
        )
    if found:
        said["prefix-cache hit"] = (
            f"{listed(found)} were in the cache, because an earlier request began the same way. "
            "They were not computed again."
        )
    if left := [name for name, m in metrics.items() if m.finish_reason == "abort"]:
        said["abort"] = f"{listed(left)} stopped early, because its reader left. Its memory was free at once."
    return said


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
