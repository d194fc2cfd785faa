"""The comparison of the texts of a run on a learner's parts with those of a run on the engine's own."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile, zip_longest

from labs.kit.learner.parts import LearnerParts
from labs.kit.learner.screen import width
from mini_engine.model import CausalLM
from mini_engine.show.demo import demo_engine, serve
from mini_engine.show.demo_report import Answer
from mini_engine.text.tokenizer import Tokenizer

EXACT = 1_000_000_000  # parameters up to which a second run in float64 is quick enough
Answers = Mapping[str, Answer]


@dataclass(frozen=True)
class Departure:
    """The request whose answer departs first, and the token at which it does (from 1)."""

    request_id: str
    token: int
    yours: Answer
    expected: Answer
    num_others: int  # answers that differ, too

    def lines(self) -> list[str]:
        """Return the departure in words."""
        texts = self.yours.text, self.expected.text
        head = f"The answer of {self.request_id} is not that of the engine's own parts"
        if texts[0] == texts[1]:
            lines = [f"{head}: the text is the same, but {self._otherwise()}"]
        else:
            same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))))
            lines = [f"{head}, from token {self.token} (character {same + 1}) on:"]
            names = ("yours:", "the engine's:")
            lines += [f"  {name:<14}{_around(text, same)}" for name, text in zip(names, texts, strict=True)]
        if self.num_others:
            more = "answer differs" if self.num_others == 1 else "answers differ"
            lines.append(f"{self.num_others} more {more}.")
        return lines

    def _otherwise(self) -> str:
        yours, expected = self.yours, self.expected
        if yours.pieces == expected.pieces:
            return f"the request ends by {yours.finish_reason!r} instead of {expected.finish_reason!r}."
        pieces = [pieces[self.token - 1 : self.token] for pieces in (yours.pieces, expected.pieces)]
        given = [repr(piece[0]) if piece else "nothing" for piece in pieces]
        return f"token {self.token} gives out {given[0]} instead of {given[1]}."


def first_departure(yours: Answers, expected: Answers) -> Departure | None:
    """Return the answer that differs in the earliest step of the engine's own run, if any does."""
    found: list[tuple[int, int, str, int]] = []
    for request_id, answer in expected.items():
        mine = yours.get(request_id, Answer(answer.prompt))
        pieces = zip_longest(mine.pieces, answer.pieces)
        token = next((i for i, (given, wanted) in enumerate(pieces) if given != wanted), len(answer.pieces))
        if mine.pieces != answer.pieces or mine.finish_reason != answer.finish_reason:
            step = (answer.steps or [0])[min(token, len(answer.steps) - 1)]
            found.append((step, len(found), request_id, token))
    if not found:
        return None
    _, _, request_id, token = min(found)
    mine = yours.get(request_id, Answer(expected[request_id].prompt))
    return Departure(request_id, token + 1, mine, expected[request_id], len(found) - 1)


def compared(
    learner: LearnerParts,
    answers: Answers,
    model: CausalLM,
    tokenizer: Tokenizer,
    temperature: float | None = None,
) -> tuple[bool, list[str]]:
    """Return whether the answers of a learner's parts are right, and the lines that say so."""
    expected = answered(None, model, tokenizer, temperature)
    departure = first_departure(answers, expected)
    if departure is None:
        return True, ["All answers are those of the engine's own parts."]
    lines = departure.lines()
    if sum(weight.numel() for weight in model.parameters()) <= EXACT:
        exact = copy.deepcopy(model).double()
        expected = answered(None, exact, tokenizer, temperature)
        if not departs(learner, exact, tokenizer, temperature, expected):
            same = "In float64 all answers are the same: the difference is rounding in"
            return True, [*lines, f"{same} {model.dtype}."]
        model = exact
    return False, [*lines, *_culprit(learner, model, tokenizer, temperature, expected)]


def answered(
    learner: LearnerParts | None, model: CausalLM, tokenizer: Tokenizer, temperature: float | None
) -> Answers:
    """Return the demo's answers on a learner's parts or the engine's own, without printing anything."""
    settings = learner.engine_args if learner else {}
    engine, workload = demo_engine(model, tokenizer, **settings | {"record": False})
    *_, answers = serve(engine, workload, temperature)
    return answers


def departs(
    learner: LearnerParts, model: CausalLM, tokenizer: Tokenizer, temperature: float | None, expected: Answers
) -> bool:
    """Return whether an answer on these parts is not the expected one, or the run ends in an error."""
    try:
        return first_departure(answered(learner, model, tokenizer, temperature), expected) is not None
    except KeyboardInterrupt:
        raise
    except BaseException:
        return True


def _culprit(
    learner: LearnerParts, model: CausalLM, tokenizer: Tokenizer, temperature: float | None, expected: Answers
) -> list[str]:
    """Name the lab whose parts alone cause the departure, if there is one."""
    labs = sorted(set(learner.names.values()))
    asked = model, tokenizer, temperature, expected
    causes = (lab_id for lab_id in labs if departs(learner.only(lab_id), *asked))
    lab_id = labs[0] if len(labs) == 1 else next(causes, None)
    if lab_id is None:
        return [f"No lab's parts cause it alone, only those of {', '.join(labs)} together."]
    alone = f"The parts of {lab_id} alone cause it. " if len(labs) > 1 else ""
    return [f"{alone}Test them:", f"  python -m labs test {lab_id}"]


def _around(text: str, place: int) -> str:
    """Return a text's characters around a place, as many as fit on the line."""
    room = max(20, min(width(), 100) - 18)
    start = max(0, place - room // 2)
    shown = text[start : start + room].replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}")
    return f"{'...' if start else ''}{shown}{'...' if start + room < len(text) else ''}"
