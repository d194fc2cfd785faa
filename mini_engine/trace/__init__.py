"""Traces: one record per step of a run, in the format that labs, engine, figures, player and grader share.

A Recorder in front of any scheduler writes the records. A file holds them as JSON Lines: a header, a line
per step, an end. A Fold of the records gives the state of every request. Nothing here needs torch; only
the percentiles need numpy.
"""

from mini_engine.trace.clock import Clock, VirtualClock, WallClock
from mini_engine.trace.compare import decisions, first_difference
from mini_engine.trace.describe import describe
from mini_engine.trace.file import LineWriter, read_trace, write_trace
from mini_engine.trace.fold import Fold, replay
from mini_engine.trace.recorder import Recorder
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
from mini_engine.trace.retention import Retention

__all__ = [
    "VERSION", "Blocked", "Clock", "End", "Event", "Finished", "Fold", "Header", "LineWriter",
    "Preempted", "Queued", "Recorder", "RequestView", "Retention", "Scheduled", "StepTrace", "Trace",
    "VirtualClock", "WallClock", "decisions", "describe", "first_difference", "read_trace", "replay",
    "write_trace",
]  # fmt: skip
