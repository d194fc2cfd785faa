"""What the notebooks share: the learner's trace, tables, guesses, figures with words, and a panel.

Everything that a notebook prints comes from here or from a trace, in virtual time, so that its
output is the same on every machine. `python -m labs.kit.learner.notebook FILE ...` runs and saves them.
"""

import contextlib
import html
import io
import logging
import os
from base64 import b64encode
from pathlib import Path

from labs.kit.judge import compare, loading
from labs.kit.judge.guard import PrintFlood, TimeUp, deadline, describe, silence
from labs.kit.judge.manifest import Lab, LabError, find_lab, impl_from_environment
from labs.kit.toys.driver import DEFAULTS, RUNS
from labs.kit.toys.toys import make_request
from mini_engine.block_manager import BlockManager
from mini_engine.scheduler import Scheduler
from mini_engine.show import figures
from mini_engine.sim.cost_model import CostModel, backend_of
from mini_engine.trace import Recorder, Trace

# matplotlib tells the first user of a machine, on stderr, that it looks for fonts.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

MARKS = {
    figures.WAITING: ".",
    figures.PREFILL: "P",
    figures.DECODE: "d",
    figures.PREEMPTED: "x",
    figures.FINISHED: " ",
    None: " ",
}

# ------------------------------------------------------------------------------- the learner's trace


def trace_of(lab_id: str, scenario: str | dict) -> Trace:
    """Run a lab's scenario (or its name) under LAB_IMPL and say in a line or two whose trace it is.

    With LAB_IMPL=starter the learner's run is compared with the reference's, and where they part,
    both are shown. Then the reference's trace is returned, so that what a page says of the run stays
    true; else the learner's. Raises LabError for an unknown lab or scenario.
    """
    lab = find_lab(lab_id)
    scenarios = loading.load(lab.id, "scenarios")
    if isinstance(scenario, str):
        named = {entry["name"]: entry for entry in scenarios.SCENARIOS}
        if scenario not in named:
            raise LabError(f"{lab.id} has no scenario {scenario!r}; it has {', '.join(map(repr, named))}")
        scenario = named[scenario]
    what = f"{lab.id}, {scenario['name']!r}:"
    teacher = "solution" if lab.file("solution.py").exists() else "engine"
    reference, trouble = _run(lab, scenarios, scenario, teacher)
    if trouble:
        raise LabError(f"{what} the reference fails: {trouble}")
    impl = impl_from_environment()
    if impl == teacher:
        print(what, f"the reference, {len(reference.steps)} steps")
        return reference
    whose = {"starter": "your starter.py", "engine": "mini_engine's own parts"}.get(impl, impl)
    yours, trouble = _run(lab, scenarios, scenario, impl)
    if trouble:
        print(what, trouble)
    elif compare.departure(yours, reference) is None:
        print(what, f"{whose}, {len(yours.steps)} steps; it decides as the reference in every one of them")
        return yours
    if yours is not None and yours.steps:
        _tell(what, whose, scenario, yours, reference)
    print("What follows on this page is the reference's run.")
    return reference


def _run(lab: Lab, scenarios, scenario: dict, impl: str) -> tuple[Trace | None, str]:
    """The trace as far as it went, and what stopped it, in words."""
    RUNS.clear()
    try:
        with deadline(lab.timeout), silence():
            trace = scenarios.run(loading.namespace(lab.id, impl), scenario)
        return trace, ""
    except (Exception, TimeUp, PrintFlood) as error:
        return (RUNS[-1][1] if RUNS else None), _in_words(lab, error)


def _in_words(lab: Lab, error: BaseException) -> str:
    from labs.kit.judge.plugin import in_words  # needs pytest, and only a run that fails needs it

    words, line = in_words(lab, error), loading.line_in_starter(error)
    where = f" (starter.py, line {line})" if line else ""
    return "; ".join(words) if words else f"it stops with {describe(error)}{where}"


def _tell(what: str, whose: str, scenario: dict, yours: Trace, reference: Trace) -> None:
    """Where two runs part, as text, and as a figure if they are small enough to be drawn."""
    found = compare.departure(yours, reference)
    if found is None:  # it stopped behind its last step
        return
    print(what, f"{whose} and the reference part in step {found.index}")
    print(compare.show(scenario, yours, reference, found))
    if yours.header["trace"] == "mini-engine":
        with contextlib.suppress(ValueError, KeyError):  # too many requests, or events that make no sense
            axes = figures.compare(yours, reference)
            show(axes, f"{whose} above the reference, from step {found.index} on")


def in_milliseconds(trace: Trace, cost: CostModel | None = None) -> Trace:
    """The same run of one unit a step, on the clock of a cost model: what its steps would take."""
    price = (cost or CostModel()).clock(backend_of(trace))
    steps, now = [], 0.0
    for record in trace.steps:
        events = [{**event, "t": now} if "t" in event else event for event in record["events"]]
        end = now + price(record)
        steps.append({**record, "t": now, "t_end": end, "events": events})
        now = end
    return Trace({**trace.header, "unit": "ms"}, steps, trace.end)


# ------------------------------------------------------------------------------------ words and tables


def table(rows: list[dict], *, indent: str = "") -> str:
    """Rows of one shape as aligned text, numbers to the right; the keys of the first are the heading."""
    columns = list(rows[0])
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    right = [all(isinstance(row[column], int | float | None) for row in rows) for column in columns]
    lines = []
    for line in cells:
        padded = (
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(line, widths, right, strict=True)
        )
        lines.append((indent + "  ".join(padded)).rstrip())
    lines.insert(1, indent + "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _cell(value) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def steps_table(trace: Trace, first: int = 0, last: int | None = None) -> str:
    """A row a step: who computed how much, the budget, who waits, the free blocks, what happened."""
    config, data = trace.header["config"], figures.timeline_data(trace)
    queues = list(zip(data["ids"], data["states"], strict=True))
    if config["policy"] == "priority":
        queues.sort(key=lambda row: data["priorities"][row[0]])
    rows = []
    for index in range(first, min(len(trace.steps), len(trace.steps) if last is None else last + 1)):
        record = trace.steps[index]
        waiting = [rid for rid, states in queues if states[index] in (figures.WAITING, figures.PREEMPTED)]
        rows.append(
            {
                "step": record["step"],
                "computed": ", ".join(f"{rid} {n}" for rid, n in record["scheduled"].items()) or "-",
                "budget": f"{record['num_batched_tokens']}/{config['max_num_batched_tokens']}",
                "waiting": " ".join(waiting) or "-",
                "free": record["num_free_blocks"],
                "what happened": "; ".join(happenings(record)) or "-",
            }
        )
    return table(rows)


def happenings(record: dict) -> list[str]:
    """The decisions of one step, a phrase each: who came, was admitted, preempted, finished, and why not."""
    words = []
    for event in record["events"]:
        name, kind = event["id"], event["type"]
        if kind == "SCHEDULED":
            cached = event["num_cached_tokens"]
            words.append(f"{name} admitted" + (f", {cached} tokens cached" if cached else ""))
        elif kind == "PREEMPTED":
            words.append(f"{name} preempted: needed {event['needs']}, free {event['free']}")
        elif kind == "FINISHED":
            words.append(f"{name} finished ({event['reason']})")
    why = record["blocked"]
    reasons = {
        "preempted": "room was made, nobody is admitted",
        "slots": "no slot",
        "budget": "no budget",
        "memory": f"needs {why.get('needs')} blocks, {why.get('free')} free",
    }
    if why["reason"] in reasons:
        words.append(f"{why['id']} waits: {reasons[why['reason']]}")
    return words


def timeline_text(trace: Trace) -> str:
    """The timeline as letters, a row a request and a column a step."""
    data = figures.timeline_data(trace)
    width = max(len(rid) for rid in data["ids"])
    tens = "".join(f"{step:<10}" for step in data["steps"][::10])
    lines = [f"{'step':{max(width, 4)}}  {tens.rstrip()}"]
    for rid, states in zip(data["ids"], data["states"], strict=True):
        lines.append(f"{rid:{max(width, 4)}}  {''.join(MARKS[state] for state in states)}".rstrip())
    return "\n".join([*lines, "      . waiting   P prefill   d decode   x preempted"])


def show(axes, alt: str) -> None:
    """Show a figure once, with `alt` for whoever cannot see it; notebooks are compared by that text."""
    from IPython.display import display

    picture = io.BytesIO()
    figures.save(axes, picture, dpi=130)
    png = b64encode(picture.getvalue()).decode()
    display(
        {"image/png": png, "text/plain": alt}, raw=True, metadata={"image/png": {"alt": alt, "width": 780}}
    )


# -------------------------------------------------------------------------------------------- guesses


def check(guesses: dict, answers: dict, *, within: float = 0.1) -> None:
    """Print each question with the reader's guess and the answer that the run gave. Never raises.

    A guess left as `...` is fine. Numbers are close within that share of the answer; texts and lists
    must agree, capitals apart.
    """
    rows = []
    for question, answer in answers.items():
        guess = guesses.get(question, ...)
        rows.append(
            {
                "question": question,
                "your guess": "-" if _is_open(guess) else _cell(guess),
                "it is": _cell(answer),
                "": _verdict(guess, answer, within),
            }
        )
    print(table(rows))
    if all(_is_open(guesses.get(question, ...)) for question in answers):
        print(
            "\nNo guess yet, and that is fine. Put yours in place of the dots above and run both cells again."
        )


def _is_open(guess) -> bool:
    return guess is ... or guess is None or guess == ""


def _verdict(guess, answer, within: float) -> str:
    if _is_open(guess):
        return "no guess yet"
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        try:
            number = float(str(guess).strip().rstrip("%"))
        except ValueError:
            return "a number, please"
        if abs(number - answer) <= 0.005 * abs(answer):
            return "right"
        if abs(number - answer) <= within * abs(answer):
            return "close"
        return "it is more" if number < answer else "it is less"
    same = str(guess).strip().casefold() == str(answer).strip().casefold()
    return "right" if same else "not this time: see why below"


# ---------------------------------------------------------------------------------------------- panel


def changed(scenario: dict, **config) -> dict:
    """The same requests under other settings: changed(scenario, num_blocks=40)."""
    return {**scenario, "config": scenario["config"] | config}


class LiveRun:
    """A scenario under the real Scheduler and BlockManager, a step at a time.

    Raises ValueError, as they do, for settings that cannot work or a request that could never finish.
    """

    def __init__(self, scenario: dict):
        config = DEFAULTS | {"prefix_caching": False} | scenario["config"]
        kv = BlockManager(
            config["num_blocks"],
            config["block_size"],
            enable_prefix_caching=config["prefix_caching"],
            watermark=config["watermark"],
        )
        names = ("policy", "max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")
        self.recorder = Recorder(Scheduler(kv, **{name: config[name] for name in names}))
        self.trace = self.recorder.trace
        self._coming = sorted(scenario["requests"], key=lambda entry: entry.get("at", 0))

    @property
    def done(self) -> bool:
        return not self._coming and not self.recorder.has_work

    def step(self) -> dict | None:
        """Decide and take back one step; its record, or None if all is done."""
        while self._coming and self._coming[0].get("at", 0) <= self.recorder.step:
            fields = {k: v for k, v in self._coming.pop(0).items() if k != "at"}
            self.recorder.add(make_request(fields.pop("id"), fields.pop("prompt"), **fields))
        if self.done:
            return None
        scheduled = self.recorder.schedule()
        running = self.recorder.running
        ending = [r.request_id for r in running if scheduled.get(r.request_id) == r.num_new_tokens]
        self.recorder.update(scheduled, dict.fromkeys(ending, 0))
        return self.trace.steps[-1]

    def finish(self, limit: int = 1000) -> Trace:
        """Step until all is done, `limit` steps at most; the trace."""
        while not self.done and len(self.trace.steps) < limit:
            self.step()
        return self.recorder.close("drained" if self.done else "max_steps")

    def text(self) -> str:
        """The latest step as bars, its decisions, and the timeline up to it."""
        if not self.trace.steps:
            return "Nothing has been decided yet. Press Step."
        config, record = self.trace.header["config"], self.trace.steps[-1]
        used = config["num_blocks"] - record["num_free_blocks"]
        computed = ", ".join(f"{name} {n}" for name, n in record["scheduled"].items()) or "nobody"
        lines = [
            f"step {record['step']}: {computed}",
            f"budget   {compare.bar(record['num_batched_tokens'], config['max_num_batched_tokens'])}",
            f"slots    {compare.bar(record['num_running'], config['max_num_seqs'])}",
            f"KV pool  {compare.bar(used, config['num_blocks'])}",
            f"waiting  {record['num_waiting']}",
            *(f"  {words}" for words in happenings(record)),
            "",
            timeline_text(self.trace),
        ]
        return "\n".join([*lines, *(["", "All requests are done."] if self.done else [])])


# name: (label, smallest value, how many times the given value the slider goes up to)
_SLIDERS = {
    "max_num_batched_tokens": ("budget", 1, 4),
    "max_num_seqs": ("slots", 1, 3),
    "long_prefill_token_threshold": ("threshold", 0, 4),
    "num_blocks": ("pool (blocks)", 1, 3),
}


class Panel:
    """A scenario with sliders and a Step button; the last expression of a cell shows it.

    Where nothing is alive (paper, a web page) or ipywidgets is missing, its text stands there:
    the first `steps` steps of the run as given.
    """

    def __init__(self, scenario: dict, *, steps: int = 4):
        self.scenario, self.steps = scenario, steps
        self.run: LiveRun | None = None

    def __repr__(self) -> str:
        run = LiveRun(self.scenario)
        for _ in range(self.steps):
            run.step()
        return (
            "Sliders and a Step button stand here while the notebook runs (they need ipywidgets).\n"
            f"The first {len(run.trace.steps)} steps, with the settings as given:\n\n"
            f"{steps_table(run.trace)}\n\n{timeline_text(run.trace)}"
        )

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        bundle = {"text/plain": repr(self)}
        try:
            widget = self.widget()
        except ImportError:
            return bundle
        return {**widget._repr_mimebundle_(), **bundle}

    def widget(self):
        """The controls, as one ipywidgets box. Raises ImportError without ipywidgets."""
        import ipywidgets as w

        self.controls = {
            name: w.IntSlider(
                self._given(name), least, max(16, times * self._given(name)), description=label,
                continuous_update=False, style={"description_width": "initial"},
            )
            for name, (label, least, times) in _SLIDERS.items()
        }  # fmt: skip
        policy = w.Dropdown(options=["fcfs", "priority"], value=self._given("policy"), description="policy")
        self.controls["policy"] = policy
        self.screen = w.HTML()
        buttons = []
        actions = (("Step", self.step), ("To the end", self.finish), ("Start over", self.restart))
        for label, action in actions:
            button = w.Button(description=label)
            button.on_click(lambda _, action=action: action())
            buttons.append(button)
        for control in self.controls.values():
            control.observe(lambda _: self.restart(), names="value")
        self.restart()
        return w.VBox(
            [
                w.HBox(list(self.controls.values()), layout={"flex_flow": "row wrap"}),
                w.HBox(buttons),
                self.screen,
            ]
        )

    def _given(self, name: str):
        return (DEFAULTS | self.scenario["config"])[name]

    def restart(self) -> None:
        self.run = None
        self._guarded(self._start)

    def step(self) -> None:
        self._guarded(lambda: (self.run or self._start()).step())

    def finish(self) -> None:
        self._guarded(lambda: (self.run or self._start()).finish())

    def _start(self) -> LiveRun:
        settings = {name: control.value for name, control in self.controls.items()}
        self.run = LiveRun(changed(self.scenario, **settings))
        return self.run

    def _guarded(self, action) -> None:
        """Settings that cannot work are told in the panel, and the panel goes on."""
        try:
            action()
            text = self.run.text()
        except ValueError as error:
            self.run, text = None, f"These settings cannot work: {error}."
        self.screen.value = f'<pre aria-live="polite">{html.escape(text)}</pre>'


# --------------------------------------------------------------------------------------------- saving


def save(path: Path) -> None:
    """Run a notebook on the reference and save it with its outputs, and nothing of this machine in it."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": str(path.parent)}}
    options = {"store_widget_state": False, "record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, kernel_name="python3", resources=folder, **options).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            # The live panel: its id means nothing in another kernel, its text is kept.
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def main(*paths: str) -> None:
    os.environ.pop("LAB_IMPL", None)
    for path in map(Path, paths):
        save(path.resolve())
        print(f"{path}: run and saved")


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
