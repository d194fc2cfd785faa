"""One true sentence about a failure: at which step the learner's run parts from the reference's, and how.

A sentence states what the two runs recorded, never what the code does, so it cannot be wrong: what stands
before its semicolon is in the learner's record, what stands behind it in the reference's.
"""

from typing import Any

from labs.kit.judge import compare
from labs.kit.judge.sentences import operations, steps
from labs.kit.judge.sentences.rules import Sentence
from mini_engine.trace import Trace

__all__ = ["Sentence", "of_runs", "sentence"]


def of_runs(yours: compare.Runs, reference: compare.Runs) -> Sentence | None:
    """Return the sentence on the first of a test's runs that parts from the reference's, if one does."""
    first = compare.first_departing(yours, reference)
    return sentence(yours[first[0]][1], reference[first[0]][1], first[1]) if first else None


def sentence(yours: compare.Run, reference: compare.Run, found: compare.Departure) -> Sentence:
    """Return the sentence on two runs, of one kind, that part at the step `found`: the first rule's."""
    words: Any = steps if isinstance(yours, Trace) else operations
    index, both = found.index, (yours.steps, reference.steps)
    if index >= min(map(len, both)):
        return Sentence(*words.ended(yours, reference, index))
    at = words.Parting(reference, index, *(one[index] for one in both))
    return next(Sentence(*clauses) for rule in words.RULES for clauses in rule(at))
