"""A sentence, the rule that it comes from, and the hint of that rule."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

HINTS: dict[str, str] = tomllib.loads(Path(__file__).with_name("hints.toml").read_text("utf-8"))


Clauses = tuple[str, str, str]  # the rule, and what the learner's and the reference's records say


@dataclass(frozen=True)
class Sentence:
    """A true sentence in two clauses, and the rule that wrote it; "field", the plainest, has no hint."""

    rule: str
    yours: str
    reference: str

    @property
    def text(self) -> str:
        return f"{self.yours}; {self.reference}."

    @property
    def hint(self) -> str:
        return HINTS.get(self.rule, "")
