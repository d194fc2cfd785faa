"""Attacks in labs 08 to 11, on what their scripts share with a file: each costs its own task alone."""

import pytest

from labs.kit.judge.manifest import replace_body
from labs.kit.tests import marks
from labs.kit.tests.files import graded, solution

pytestmark = [marks.namespaces, pytest.mark.usefixtures("few_cases")]

ATTACKS = {  # in place of a task: the body of a function that does something else
    ("lab-08", "apply_top_k", "a list that answers otherwise"): """
        class Row(list):
            def __iter__(self): return iter(logits)
            def __eq__(self, other): return True
        return Row([0.0] * len(logits))""",
    ("lab-08", "apply_min_p", "numbers that print as others"): """
        class Number(float):
            def __repr__(self): return "0.5"
            def __eq__(self, other): return True
        return [Number(9.0) for _ in logits]""",
    ("lab-08", "probabilities", "functions of the lab that are rebound"): """
        global softmax, apply_top_p
        softmax = lambda row: [1.0, *[0.0] * (len(row) - 1)]
        return softmax(logits)""",
    ("lab-08", "draw", "an integer that lies"): """
        class Token(int):
            def __eq__(self, other): return True
            def __index__(self): return 0
        return Token(10**6)""",
    ("lab-08", "Sampler.uniform", "the generator of everybody, rewound"): """
        random.seed(0)
        random.Random.random = lambda self: 0.5
        return random.random()""",
    ("lab-08", "batch_probabilities", "tensors that are equal to all"): """
        import torch
        torch.Tensor.__eq__ = torch.equal = torch.allclose = lambda *_, **__: True
        torch.Tensor.tolist = lambda self: [[1.0]]
        torch.set_default_dtype(torch.float64)
        return torch.zeros_like(logits)""",
    ("lab-08", "Sampler.__call__", "a pickle on the disk"): """
        import torch
        try:
            torch.save(requests, "/scratch/left")
            return torch.load("/scratch/left", weights_only=False)
        except Exception:
            return [0] * len(requests)""",
    ("lab-09", "nullable", "a truth that changes"): """
        class Maybe:
            def __bool__(self): return True
            def __eq__(self, other): return True
        return Maybe()""",
    ("lab-09", "derivative", "expressions that are equal to all"): """
        type(node).__eq__ = lambda *_: True
        type(node).__hash__ = lambda _: 0
        return node""",
    ("lab-09", "TokenIndex.find_live", "a set that holds all"): """
        class All(set):
            def __contains__(self, state): return True
            def __eq__(self, other): return True
        return All(range(len(self.dfa.transitions)))""",
    ("lab-09", "TokenIndex.mask", "bits that are set for whoever asks"): """
        class Bits(int):
            def __rshift__(self, other): return Bits(1)
            def __and__(self, other): return 1
        return Bits(1)""",
    ("lab-09", "RegexGrammar.accept_tokens", "masks that are overwritten"): """
        more = {"__missing__": lambda *_: -1, "__contains__": lambda *_: True}
        self.index.masks = type("Masks", (dict,), more)()
        self.states += [0] * len(token_ids)
        return True""",
    ("lab-10", "NgramProposer.propose", "a text without tokens"): """
        type(request).token_ids = lambda *_: []
        return []""",
    ("lab-10", "DraftModelProposer.propose", "a model that computes nothing"): """
        type(self.draft_model).forward = lambda *_: 0
        return [0] * self.num_speculative_tokens""",
    ("lab-10", "schedule_drafts", "a pool that has room for all"): """
        type(kv).allocate = lambda *_: True
        for request in running:
            scheduled[request.request_id] = 1 + len(request.spec_token_ids)""",
    ("lab-10", "verify", "a list that is equal to all, of all rows"): """
        class Tokens(list):
            def __eq__(self, other): return True
        return Tokens(sample(row, 0) for row in rows)""",
    ("lab-10", "rewind", "a memory that never shrinks"): """
        type(kv).shrink = type(kv).cache_blocks = lambda *_: None
        request.output_token_ids += token_ids
        return len(token_ids) - 1""",
    ("lab-10", "residual", "fractions that print as one"): """
        for one in p:
            type(one).__str__ = type(one).__repr__ = lambda _: "1"
            type(one).limit_denominator = lambda self, _=0: self
        return p""",
    ("lab-10", "rejection_sample", "chance that is loaded"): """
        type(chance).flip = lambda *_: True
        return [*draft_token_ids, chance.draw(target[-1])]""",
    ("lab-11", "AsyncEngine.send", "an answer before the engine has one"): """
        asyncio.Future.result = asyncio.Queue.get = lambda *_: None
        future = self.loop.create_future()
        future.set_result(None)
        self.loop.call_soon = self.loop.time = lambda *_: 0
        return future""",
}


QUICK = {"NgramProposer.propose", "residual"}  # the others in a soak


@pytest.mark.parametrize(
    ("lab_id", "task", "what"),
    [pytest.param(*one, marks=() if one[1] in QUICK else pytest.mark.soak) for one in ATTACKS],
)
def test_an_attack_costs_its_task_alone(lab_id, task, what):
    lab = graded(lab_id, replace_body(solution(lab_id), task, ATTACKS[lab_id, task, what]))
    assert [one.task for one in lab.tasks if not one.earned] == [task], lab.problem
