"""The labs' foundation: toys, the judge, and the commands of `python -m labs`.

A lab's own files need only the names below. None of them imports torch.
"""

from labs.kit.judge.loading import load
from labs.kit.judge.random_scripts import judge as judge_random_scripts
from labs.kit.toys.driver import assert_drained, assert_texts_alone, drive, log_ops, one_step, tokens_of
from labs.kit.toys.loop import RequestQueue, StepLoop
from labs.kit.toys.memory import FakeKV, ToyModel
from labs.kit.toys.requests import make_request, make_running
from labs.kit.toys.scripts import Script, Skip, builtin
from labs.kit.toys.tensors import Owner, assert_close, assert_rows

__all__ = [
    "FakeKV", "Owner", "RequestQueue", "Script", "Skip", "StepLoop", "ToyModel", "assert_close",
    "assert_drained", "assert_rows", "assert_texts_alone", "builtin", "drive", "judge_random_scripts", "load",
    "log_ops", "make_request", "make_running", "one_step", "tokens_of",
]  # fmt: skip
