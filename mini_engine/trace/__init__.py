"""Traces: one record per step of a run, in the format that labs, engine, figures, player and grader share.

A Recorder in front of any scheduler writes the records. A file holds them as JSON Lines: a header, a line
per step, an end. A Fold of the records gives the state of every request. Nothing here needs torch; only
the percentiles need numpy.
"""

from mini_engine.trace.clock import VirtualClock, WallClock
from mini_engine.trace.compare import decisions, first_difference
from mini_engine.trace.file import LineWriter, read_trace, write_trace
from mini_engine.trace.fold import Fold, replay
from mini_engine.trace.keep import Keep
from mini_engine.trace.recorder import Recorder, describe
from mini_engine.trace.records import (
    VERSION,
    Blocked,
    End,
    Event,
    Finished,
    Header,
    Preempted,
    Queued,
    RequestView,
    Scheduled,
    StepTrace,
    Trace,
)

__all__ = [
    "VERSION", "Blocked", "End", "Event", "Finished", "Fold", "Header", "Keep", "LineWriter", "Preempted",
    "Queued", "Recorder", "RequestView", "Scheduled", "StepTrace", "Trace", "VirtualClock", "WallClock",
    "decisions", "describe", "first_difference", "read_trace", "replay", "write_trace",
]  # fmt: skip
