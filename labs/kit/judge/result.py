"""The result of one test on one implementation."""

from dataclasses import dataclass


@dataclass
class Result:
    """The result of one test on one variant: `said` is the error in one line, `runs` the traces' digest."""

    test: str  # the node's name, with its parameters
    passed: bool
    said: str = ""
    runs: str = ""
    seconds: float = 0.0

    @property
    def function(self) -> str:
        return self.test.partition("[")[0]
