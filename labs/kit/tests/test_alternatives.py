"""Right solutions of another shape pass every test: the labs judge behaviour, not the shape of code.

To add one, put it into alternatives/ as lab_NN_<letter>.py: a whole solution, with the lab's own names.
"""

import pytest

from labs.kit.author.check import alternatives, outcomes_of
from labs.kit.judge.manifest import find_lab, lab_ids


@pytest.mark.parametrize("lab_id", lab_ids())
def test_right_but_different_solutions_pass(kept, lab_id):
    lab = find_lab(lab_id)
    others = alternatives(lab)
    assert len(others) >= 2, f"{lab_id} needs two solutions of another shape in labs/kit/tests/alternatives"
    outcomes = outcomes_of(lab, kept)
    assert not outcomes.trouble, outcomes.trouble
    for other in others:
        assert len(outcomes.results[other]) >= len(lab.tests)
        assert [(r.test, r.said) for r in outcomes.results[other] if not r.passed] == []
