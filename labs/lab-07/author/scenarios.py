"""lab-07's scenarios, and how one is run: a whole Engine around `step`, on a tiny or the embedded model.

All parts but `step` are the engine's own, so that a verdict is about `step` alone; `play` takes other
parts (LearnerParts.from_labs) where they are to be tried together.
"""

from dataclasses import replace

from labs.kit.tensor_toys import engines
from labs.kit.toys.workloads import workload
from mini_engine.engine import Engine
from mini_engine.parts import Parts
from mini_engine.trace import Trace

_IMPORTANT = [("A", 12, 10, 0, 2), ("B", 10, 10, 0, 2), ("C", 9, 6, 4, 0)]
_SEEDED = [(f"r{i}", 9 + i, 8, i, {"temperature": 1.0, "seed": i}) for i in range(4)]
_ALIKE = [("A", list(range(24)), 5, 0), ("B", [*range(20), 7, 7, 7], 5, 2)]
_LEAVE = [("A", 30, 5, 0), ("B", 6, 9, 0), ("C", 12, 9, 0)]
_PLAYS = [
    ("romeo", "O Romeo, ", 10, 0),
    ("king", "KING HENRY:\nMy lord of ", 6, 0),
    ("late", "O Romeo, Romeo, wherefore ", 9, 3),
    ("sampled", "HAMLET:\n", 9, 3, {"temperature": 0.8, "seed": 7}),
]


def _scenario(name, requests, size=4, **config):
    return workload(name, requests, block_size=size, **{"policy": "fcfs", "watermark": 0} | config)


SCENARIOS = [
    _scenario("one alone", [("A", 5, 6, 0)]),
    _scenario("three at once", [("A", 5, 4, 0), ("B", 3, 6, 0), ("C", 4, 2, 0)]),
    _scenario("one token is all they want", [("A", 5, 1, 0), ("B", 20, 1, 0), ("C", 4, 1, 1)]),
    _scenario("a long prompt beside a chat", [("chat", 4, 9, 0), ("essay", 40, 3, 2)], budget=8),
    _scenario("nothing but chunks", [("A", 30, 2, 0)], budget=7, slots=2),
    _scenario("no room for B until A is done", [("A", 10, 4, 0), ("B", 9, 3, 0)], blocks=4),
    _scenario("preempted, twice over", [("A", 6, 12, 0), ("B", 7, 12, 0), ("C", 5, 9, 1)], 3, blocks=9),
    _scenario(
        "the important one comes late, and the rows change places", _IMPORTANT, blocks=9, policy="priority"
    ),
    _scenario("the same beginning", _ALIKE, budget=32, prefix_caching=True),
    _scenario("drawn at random, each from its own seed", _SEEDED, blocks=9),
    _scenario("a pause", [("A", 5, 3, 0), ("B", 5, 3, 9)]),
    _scenario("some leave", _LEAVE, budget=8, aborts=[(1, "A"), (6, "B")]),
    _scenario("the plays", _PLAYS, blocks=12, model="shakespeare", prefix_caching=True),
]


def make_engine(step=None, *, learner=None, **config) -> Engine:
    """An Engine for a scenario's config, with `step` in it, and `learner`'s parts where there are any."""
    parts, names = (learner.parts, dict(learner.names)) if learner else (Parts(), {})
    if step is not None:
        parts, names = replace(parts, step=step), names | {"step": "lab-07"}
    return engines.make_engine(parts, names, **config)


def play(lab, scenario: dict, *, raise_errors: bool = True, learner=None) -> engines.Played:
    """Run a scenario under `lab.step`."""
    engine = make_engine(lab.step, learner=learner, **scenario["config"])
    return engines.play(engine, scenario, raise_errors=raise_errors)


def run(lab, scenario: dict, *, raise_errors: bool = True) -> Trace:
    """The trace of one scenario under `lab.step`."""
    return play(lab, scenario, raise_errors=raise_errors).trace
