"""Shared by the notebooks: the learner's trace, tables, pictures, guesses, quizzes, and a panel.

A notebook prints from here or from a trace, in virtual time, so its output is the same on every machine.
`python -m labs.kit.author.notebooks FILE ...` runs and saves notebooks.
"""

from labs.kit.learner.notebook.guesses import check
from labs.kit.learner.notebook.live import changed, run_scenario
from labs.kit.learner.notebook.panel import Panel
from labs.kit.learner.notebook.pictures import show
from labs.kit.learner.notebook.quiz import Quiz
from labs.kit.learner.notebook.traces import in_milliseconds, trace_of
from labs.kit.learner.notebook.words import happenings, steps_table, table, timeline_text

__all__ = [
    "Panel", "Quiz", "changed", "check", "happenings", "in_milliseconds", "run_scenario", "show",
    "steps_table", "table", "timeline_text", "trace_of",
]  # fmt: skip
