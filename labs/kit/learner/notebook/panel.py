"""The panel: a scenario with sliders and a Step button, and its text where nothing is alive."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from labs.kit.learner.notebook.live import LiveRun, Scenario, settings
from labs.kit.learner.notebook.words import steps_table, timeline_text

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

    def __init__(self, scenario: Scenario, *, steps: int = 4) -> None:
        self.scenario, self.steps = scenario, steps
        self.config = settings(scenario)
        self.run: LiveRun | None = None

    def __repr__(self) -> str:
        run = LiveRun(self.scenario, self.config)
        for _ in range(self.steps):
            run.step()
        return (
            "Sliders and a Step button stand here while the notebook runs (they need ipywidgets).\n"
            f"The first {run.recorder.step} steps, with the settings as given:\n\n"
            f"{steps_table(run.trace)}\n\n{timeline_text(run.trace)}"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle = {"text/plain": repr(self)}
        try:
            widget = self.widget()
        except ImportError:
            return bundle
        return {**widget._repr_mimebundle_(), **bundle}

    def widget(self) -> Any:
        """The controls, as one ipywidgets box. Raises ImportError without ipywidgets."""
        import ipywidgets as w

        self.controls = {name: self._slider(name, *limits) for name, limits in _SLIDERS.items()}
        self.controls["policy"] = w.Dropdown(
            options=["fcfs", "priority"], value=self.config.policy, description="policy"
        )
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
        controls = w.HBox(list(self.controls.values()), layout={"flex_flow": "row wrap"})
        return w.VBox([controls, w.HBox(buttons), self.screen])

    def _slider(self, name: str, label: str, least: int, times: int) -> Any:
        from ipywidgets import IntSlider

        given = getattr(self.config, name)
        look = {"description": label, "style": {"description_width": "initial"}}
        return IntSlider(given, least, max(16, times * given), continuous_update=False, **look)

    def restart(self) -> None:
        self.run = None
        self._guarded(lambda run: None)

    def step(self) -> None:
        self._guarded(LiveRun.step)

    def finish(self) -> None:
        self._guarded(LiveRun.finish)

    def _start(self) -> LiveRun:
        chosen = {name: control.value for name, control in self.controls.items()}
        self.run = LiveRun(self.scenario, replace(self.config, **chosen))
        return self.run

    def _guarded(self, action: Callable[[LiveRun], object]) -> None:
        """Settings that cannot work are reported in the panel, and the panel goes on."""
        try:
            run = self.run or self._start()
            action(run)
            text = run.text()
        except ValueError as error:
            self.run, text = None, f"These settings cannot work: {error}."
        self.screen.value = f'<pre aria-live="polite">{html.escape(text)}</pre>'
