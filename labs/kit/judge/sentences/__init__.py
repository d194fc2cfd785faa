"""One true sentence about a failure: at which step the learner's run parts from the reference's, and how.

A sentence states what the two runs recorded, never what the code does, so it cannot be wrong: what stands
before its semicolon is in the learner's record, what stands behind it in the reference's.
"""

from labs.kit.judge import compare
from labs.kit.judge.sentences import operations, steps
from labs.kit.judge.sentences.rules import Sentence
from labs.kit.toys.driver import OpLog
from mini_engine.trace import Trace

__all__ = ["Sentence", "of_runs", "sentence"]


def of_runs(yours: compare.Runs, reference: compare.Runs) -> Sentence | None:
    """Return the sentence on the first of a test's runs that parts from the reference's, if one does."""
    first = compare.first_departing(yours, reference)
    return sentence(yours[first[0]][1], reference[first[0]][1], first[1]) if first else None


def sentence(yours: compare.Run, reference: compare.Run, found: compare.Departure) -> Sentence:
    """Return the sentence on two runs that part at the step `found`."""
    if isinstance(yours, Trace) and isinstance(reference, Trace):
        return steps.sentence(yours, reference, found.index)
    assert isinstance(yours, OpLog) and isinstance(reference, OpLog), "a test's runs are of one kind"
    return operations.sentence(yours, reference, found.index)
