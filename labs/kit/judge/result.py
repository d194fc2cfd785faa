"""What one test did with one implementation."""

from dataclasses import dataclass


@dataclass
class Result:
    """What one test did with one variant. `said` is its failure in one line, `runs` what it traced."""

    test: str  # the node's name, with its parameters
    passed: bool
    said: str = ""
    runs: str = ""
    seconds: float = 0.0

    @property
    def function(self) -> str:
        return self.test.partition("[")[0]
