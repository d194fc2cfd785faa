"""The front page's stage and workbench.

`<!-- {stage} chats -->` is the run of six chats on one memory that docs/images/hero.py recorded: one moment
of it and the captions; hero.js plays the rest. `<!-- {bench} lab-01 -->` is a loop with a mistake, to run
and to mend, with the verdict that docs/images/break_it.py recorded; bench.js runs it.
"""

import json
from html import escape
from typing import Any

import runs
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from mini_engine.trace import RequestView, Trace, replay

SLOWER = 20  # times, on the page
STATES = {  # by the letter that stands for it in a frame
    "-": "", "r": "reads", "w": "writes", "p": "has to wait", "b": "reads again", "d": "finished",
}  # fmt: skip
FREE = "."
CAPTIONS = (
    "Six chats ask one small model to go on with their lines. It answers all six at once.",
    "The model must keep in memory all that was said. Each box holds 16 letters of one chat.",
    "Every answer grows, and the memory is nearly full.",
    "No box was left for the next letters. The chat that came last gives its boxes back, and has to wait.",
    "Two chats are finished, and their boxes are free. The sixth chat is read into memory again.",
    "Its text goes on where it stopped, in the middle of a word. No letter was lost.",
)


def frames() -> list[tuple[float, str, str, str]]:
    """Return each step's start in ms, the chats' states, the owner of each block, and the chats that got a
    letter when it ended."""
    trace, texts = runs.hero()
    found = []
    for record, views in replay(trace):
        states = "".join(_state(views[name]) if name in views else "-" for name in texts)
        owners = {block: view.request_id for view in views.values() for block in view.blocks}
        memory = "".join(owners.get(block, FREE) for block in range(trace.header.config["num_blocks"]))
        found.append((round(record.t, 1), states, memory, "".join(record.new_tokens)))
    return [*found, (round(trace.steps[-1].t_end, 1), "d" * len(texts), FREE * len(found[0][2]), "")]


def _state(view: RequestView) -> str:
    if view.state == "prefill":
        return "b" if view.num_preemptions else "r"
    return {"decode": "w", "waiting": "p", "preempted": "p", "finished": "d"}[view.state]


def beats(trace: Trace) -> list[tuple[int, str]]:
    """Return the step at which each caption appears."""
    events = [(event.type, record.step) for record in trace.steps for event in record.events]
    (stops,) = [step for kind, step in events if kind == "PREEMPTED"]
    (returns,) = [step for kind, step in events if kind == "SCHEDULED" and step > stops]
    at = (0, 22, stops - 12, stops, returns, returns + 3)
    return list(zip(at, CAPTIONS, strict=True))


def stage() -> str:
    """Return the stage as HTML, in the moment when a chat has to wait."""
    trace, texts = runs.hero()
    played, shown = frames(), beats(trace)
    stopped = shown[3][0]
    written = "".join(new for *_, new in played[:stopped])
    data = {
        "slower": SLOWER,
        "states": STATES,
        "letters": {name: "".join(letters) for name, (_, letters) in texts.items()},
        "beats": [step for step, _ in shown],
        "frames": played,
    }
    _, states, memory, _ = played[stopped]
    chats = "".join(
        _chat(name, prompt, "".join(letters[: written.count(name)]), state)
        for (name, (prompt, letters)), state in zip(texts.items(), states, strict=True)
    )
    boxes = "".join(f'<i data-chat="{owner}">{owner.strip(FREE)}</i>' for owner in memory)
    captions = "".join(f"<li>{escape(words)}</li>" for _, words in shown)
    return (
        f'<div class="hero"><ol class="chats" aria-hidden="true">{chats}</ol>'
        f'<div class="memory" aria-hidden="true"><b>memory</b><span class="boxes">{boxes}</span></div>'
        f'<ol class="beats">{captions}</ol><div class="steps"></div>'
        f'<script type="application/json">{json.dumps(data, separators=(",", ":"))}</script></div>'
    )


def _chat(name: str, prompt: str, written: str, state: str) -> str:
    speaker, _, asked = prompt.partition(":\n")
    return (
        f'<li data-chat="{name}" data-state="{state}"><div><b>{escape(speaker.title())}</b> '
        f"<small>{STATES[state]}</small></div><p>{escape(asked)}"
        f'<span class="said">{escape(written)}</span><span class="rest"></span></p></li>'
    )


class Stage(SphinxDirective):
    """`<!-- {stage} chats -->`: the stage. Without a script it shows the moment when a chat has to wait."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        up = "../" * self.env.docname.count("/")
        sheet = f'<link rel="stylesheet" href="{up}_static/hero.css">'
        text = f'{sheet}{stage()}<script defer src="{up}_static/hero.js"></script>'
        return [nodes.raw("", text, format="html")]


class Bench(SphinxDirective):
    """`<!-- {bench} lab-01 -->`: lab-01's loop with a known mistake in an editor, and Run."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        recorder = runs.module("images/break_it.py")
        verdict = json.loads(recorder.RECORDING.read_text("utf-8"))
        data = json.dumps({"before": recorder.BEFORE, "verdict": verdict}).replace("<", "\\u003c")
        up = "../" * self.env.docname.count("/")
        text = (
            f'<link rel="stylesheet" href="{up}_static/bench.css">'
            '<div class="bench"><textarea aria-label="the loop, in Python" spellcheck="false" wrap="off" '
            f'autocapitalize="off" autocomplete="off" rows="{len(recorder.SHOWN.splitlines()) + 1}">'
            f"{escape(recorder.SHOWN)}</textarea>"
            '<p><button type="button" class="run">Run</button> <button type="button" class="again" hidden>'
            'Start over</button> <span class="status" role="status"></span></p>'
            '<div class="answer" aria-live="polite"></div>'
            f'<script type="application/json">{data}</script></div>'
            f'<script defer src="{up}_static/bench.js"></script>'
        )
        return [nodes.raw("", text, format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("stage", Stage)
    app.add_directive("bench", Bench)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
