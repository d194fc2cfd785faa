"""What the labs stand on: toys, the driver, loading, the pytest plugin, `python -m labs`.

A lab's own files need only the names below. None of them imports torch.
"""

from labs.kit.driver import assert_drained, drive, log_ops, one_step
from labs.kit.loading import load
from labs.kit.tensors import assert_close
from labs.kit.toys import FakeKV, RequestQueue, StepLoop, ToyModel, make_request, make_running

__all__ = [
    "FakeKV",
    "RequestQueue",
    "StepLoop",
    "ToyModel",
    "assert_close",
    "assert_drained",
    "drive",
    "load",
    "log_ops",
    "make_request",
    "make_running",
    "one_step",
]
