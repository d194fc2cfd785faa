"""The panel: a scenario with sliders above the player, run on the learner's code beside the reference."""

from __future__ import annotations

import html
import os
import re
from dataclasses import replace
from typing import Any

from labs.kit.judge import compare, loading, sentences
from labs.kit.judge.compare import Run
from labs.kit.judge.manifest import find_lab, impl_from_environment
from labs.kit.learner.notebook.live import Scenario, changed, run_scenario
from labs.kit.learner.notebook.traces import attempt
from labs.kit.toys.driver import DEFAULTS
from mini_engine.show.player.picture import step_picture, step_words
from mini_engine.trace import Trace

SECONDS = 3.0  # limit of a run of the learner's code; the tests have more
IMPLEMENTATIONS = {"starter": "your starter.py", "solution": "solution.py", "engine": "mini_engine"}
# name: (label, smallest value, largest value as a multiple of the given one)
SLIDERS = {
    "max_num_batched_tokens": ("budget", 1, 4),
    "max_num_seqs": ("slots", 1, 3),
    "long_prefill_token_threshold": ("threshold", 0, 4),
    "num_blocks": ("pool (blocks)", 1, 3),
    "block_size": ("block size", 1, 4),
    "watermark": ("watermark", 0, 4),
    "slots": ("tokens a step", 1, 2),
    "max_num_requests": ("places", 1, 2),
}
FIXED = {"lab-04": ("block_size", "watermark", "prefix_caching", "policy"), "lab-05": ("prefix_caching",)}
FIXED["lab-07"] = ("watermark", "prefix_caching")
FIXED["lab-08"] = ("block_size", "prefix_caching")
FIXED["lab-10"] = ("watermark", "policy")
FIXED["lab-11"] = (*DEFAULTS, "max_num_batched_tokens", "max_num_seqs", "num_blocks")


class Panel:
    """A scenario, sliders for its settings, and the player, shown as the last expression of a cell.

    With a `lab`, a switch chooses its part: the learner's own, the solution's, or the engine's. starter.py is
    read again for each run, and if the runs differ, both are shown. Without a kernel (on paper, in a web
    page) it is a picture of step `step` of the reference.
    """

    def __init__(self, scenario: Scenario, lab: str | None = None, *, step: int = 0) -> None:
        self.scenario = changed(scenario, **DEFAULTS | scenario["config"])
        self.lab = find_lab(lab) if lab else None
        self.step = step

    def __repr__(self) -> str:
        trace = self._reference({})
        words = step_words(trace, self.step) if isinstance(trace, Trace) else []
        here = "The player, with sliders, stands here while the notebook runs (it needs anywidget)."
        return " ".join([here, *words])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": repr(self)}
        trace = self._reference({})
        if isinstance(trace, Trace):
            bundle["image/svg+xml"] = step_picture(trace, self.step)
        try:
            widget = self.widget()
        except ImportError:
            return bundle
        return {**widget._repr_mimebundle_(), **bundle}

    # -------------------------------------------------------------------------------------- the screen

    def widget(self) -> Any:
        """Return controls and player as one box. Raise ImportError without ipywidgets or anywidget."""
        import ipywidgets as w

        from mini_engine.show.player.widget import PlayerWidget

        fixed = FIXED.get(self.lab.id, ()) if self.lab else ()
        given = self.scenario["config"]
        self.controls = {name: self._slider(name) for name in SLIDERS if name in given and name not in fixed}
        config = self.scenario["config"]
        if "policy" not in fixed:
            options = {"options": ["fcfs", "priority"], "value": config["policy"], "description": "policy"}
            self.controls["policy"] = w.Dropdown(**options)
        if "prefix_caching" not in fixed:
            self.controls["prefix_caching"] = w.Checkbox(config["prefix_caching"], description="prefix cache")
        self.switch, self.again = w.ToggleButtons(options=self._impls()), w.Button(description="Run again")
        self.switch.value = self._first_impl()
        self.message = w.HTML()
        self.player = PlayerWidget(self._reference({}), names=("the reference",), veil=True)
        for control in self.controls.values():
            control.observe(lambda _: self.run(), names="value")
        self.switch.observe(lambda _: self.run(to_departure=True), names="value")
        self.again.on_click(lambda _: self.run(to_departure=True))
        self.run(to_departure=True)
        layout = {"grid_template_columns": "repeat(auto-fill, 310px)"}
        grid = w.GridBox(list(self.controls.values()), layout=layout)
        switch = [w.HBox([self.switch, self.again], layout={"align_items": "center"})] if self.lab else []
        return w.VBox([grid, *switch, self.message, self.player])

    def _slider(self, name: str) -> Any:
        from ipywidgets import IntSlider

        label, least, times = SLIDERS[name]
        given = self.scenario["config"][name]
        look = {"description": label, "style": {"description_width": "90px"}}
        return IntSlider(given, least, max(16, times * given), continuous_update=False, **look)

    def _impls(self) -> list[tuple[str, str]]:
        there = {"engine", *(["starter"] if self.lab else [])}
        there |= {"solution"} if self.lab and self.lab.has_solution else set()
        return [(words, impl) for impl, words in IMPLEMENTATIONS.items() if impl in there]

    def _first_impl(self) -> str:
        """Return the learner's own code if any of it is written, unless LAB_IMPL says otherwise."""
        if not self.lab:
            return "engine"
        if os.environ.get("LAB_IMPL"):
            return impl_from_environment()
        starter = self.lab.file("starter.py")
        text = starter.read_text("utf-8", errors="replace") if starter.exists() else ""
        unwritten = all(re.search(rf"{task.name}[.\w]* is not written yet", text) for task in self.lab.tasks)
        return "engine" if unwritten else "starter"

    # ------------------------------------------------------------------------------------------ the runs

    def run(self, to_departure: bool = False) -> None:
        """Run with the current settings and show it; with `to_departure` at the step where the two differ."""
        chosen = {name: control.value for name, control in self.controls.items()}
        try:
            reference = self._reference(chosen)
        except ValueError as error:
            return self._say(f"These settings cannot work: {error}.")
        yours, trouble = self._yours(chosen) if self.switch.value != "engine" else (None, "")
        found = compare.departure(yours, reference) if yours and yours.steps else None
        name, said = IMPLEMENTATIONS[self.switch.value], ""
        if yours and found:
            # The ends alone may differ: then no step parts.
            said = sentences.sentence(yours, reference, found).text if found.yours or found.reference else ""
            where = f"differ from step {found.index} on" if said else "end differently"
            self._say(trouble, f"The runs of {name} and of the reference {where}.")
        elif trouble:
            self._say(trouble, "The player shows the reference's run.")
        else:
            self._say(f"The run of {name} is the same as the reference's in every step." if yours else "")
        same = f"{name}, as the reference" if yours and not trouble else "the reference"
        runs = ((yours, name), (reference, "the reference")) if found else ((reference, same),)
        shown, names = zip(*runs, strict=True)
        step = self._place(found, reference, to_departure)
        self.player.show(*shown, names=names, veil=True, step=step, said=said)

    def _place(self, found: compare.Departure | None, reference: Run, to_departure: bool) -> int | None:
        """Return the step to show: where the runs differ, the end if it was shown, else as before."""
        if found and to_departure:
            return found.index
        before = max(len(trace["steps"]) for trace in self.player.payload["traces"])
        step = self.player.step or 0
        return min(step, len(reference.steps) - 1) if step < before - 1 else len(reference.steps) - 1

    def _say(self, *sentences: str) -> None:
        words = html.escape(" ".join(filter(None, sentences)))
        self.message.value = f'<p role="status" style="line-height: 1.4">{words}</p>'

    def _reference(self, chosen: dict[str, Any]) -> Run:
        lab_id = self.lab.id if self.lab else ""
        module = loading.namespace(lab_id, "engine") if lab_id else None
        return run_scenario(changed(self.scenario, **chosen), lab_id, module)

    def _yours(self, chosen: dict[str, Any]) -> tuple[Run | None, str]:
        """Return the run as far as it went and the error that stopped it; starter.py is read again."""
        assert self.lab
        lab = replace(self.lab, timeout=min(SECONDS, self.lab.timeout))
        scenario, read = changed(self.scenario, **chosen), loading.namespace.__wrapped__
        run, trouble = attempt(lab, lambda: run_scenario(scenario, lab.id, read(lab.id, self.switch.value)))
        return run, f"{trouble}." if trouble else ""
