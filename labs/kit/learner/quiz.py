"""`python -m labs quiz`: the book's questions on a terminal. A wrong answer is explained and asked again."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from zlib import crc32

from rich.text import Text

from labs.kit.judge.manifest import LABS_DIR, LabError, made, tables, toml
from labs.kit.learner.screen import WIDEST, bar, filled, say, show

FILE = LABS_DIR.parent / "docs" / "quizzes.toml"
LETTERS = "abcdef"


@dataclass(frozen=True)
class Answer:
    text: str
    why: str
    right: bool = False


@dataclass(frozen=True)
class Question:
    ask: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Topic:
    name: str
    title: str
    page: str
    questions: tuple[Question, ...]


@cache
def topics() -> dict[str, Topic]:
    """Return the topics of docs/quizzes.toml in reading order. Raise LabError if it is missing or wrong."""
    try:
        entries = toml(FILE)
    except OSError as error:
        raise LabError(f"the questions are in docs/quizzes.toml, which cannot be read: {error}") from error
    return {name: _topic(name, entry) for name, entry in entries.items()}


def _topic(name: str, entry: Any) -> Topic:
    if not isinstance(entry, dict):
        raise LabError(f"{FILE}: {name!r} is not a section; a topic is [{name}]")
    questions = tuple(map(_question, tables(FILE, entry, "question")))
    own = {key: value for key, value in entry.items() if key != "question"}
    return made(FILE, Topic, own | {"name": name, "questions": questions})


def _question(entry: dict[str, Any]) -> Question:
    """The answers are in an order that does not depend on which is right, the same in every build."""
    answers = [made(FILE, Answer, answer) for answer in tables(FILE, entry, "answer")]
    own = {key: value for key, value in entry.items() if key != "answer"}
    question = made(FILE, Question, own | {"answers": tuple(answers)})
    if not any(answer.right for answer in answers) or len(answers) > len(LETTERS):
        raise LabError(f"{FILE}: {question.ask!r} needs a right answer, and {len(LETTERS)} answers at most")
    answers.sort(key=lambda answer: crc32((question.ask + answer.text).encode()))
    return Question(question.ask, tuple(answers))


def find_topic(name: str) -> Topic:
    """Return a topic by its name. Raise LabError with the names of all topics."""
    if name not in topics():
        raise LabError(f"no quiz is called {name!r}; the topics are {', '.join(topics())}")
    return topics()[name]


def list_topics() -> None:
    for topic in topics().values():
        say(f"{topic.name:<11}{len(topic.questions)}  {topic.title}")
    say()
    say("python -m labs quiz NAME asks the questions of a topic; q ends")


def ask(topic: Topic, read: Callable[[str], str] = input) -> tuple[int, int]:
    """Ask a topic's questions. Return how many were right at the first try, and how many were answered.

    The answers are shuffled each time, so that a learner does not learn letters.
    """
    right = asked = 0
    say(f"{topic.title}: {len(topic.questions)} questions. Answer with a letter; q ends.")
    for number, question in enumerate(topic.questions, 1):
        answers = random.sample(question.answers, len(question.answers))
        say()
        say(f"{bar(number - 1, len(topic.questions))} {number} of {len(topic.questions)}", "cyan")
        _print(f"{number}. {question.ask}", style="bold")
        for letter, answer in zip(LETTERS, answers, strict=False):
            _print(f"   {letter}) {answer.text}", 3)
        first = _until_right(answers, read)
        if first is None:
            break
        right, asked = right + first, asked + 1
    say()
    say(f"{bar(right, len(topic.questions))} {right} of {asked} right at the first try; more in {topic.page}")
    return right, asked


def _until_right(answers: list[Answer], read: Callable[[str], str]) -> bool | None:
    """Return True if the first answer was right, False if a later one was, None to stop."""
    tries, letters = 0, LETTERS[: len(answers)]
    while True:
        try:
            letter = read("> ").strip().lower()
        except EOFError:
            return None
        if letter == "q":
            return None
        if len(letter) != 1 or letter not in letters:
            say(f"type a letter: {', '.join(letters)}, or q to end")
            continue
        answer = answers[letters.index(letter)]
        verdict, style = ("Right.", "green") if answer.right else ("Not so.", "red")
        said = Text(filled(f"{verdict} {answer.why}".replace("`", ""), WIDEST))
        said.stylize(f"bold {style}", 0, len(verdict))
        show(said)
        if answer.right:
            return tries == 0
        tries += 1


def _print(text: str, hang: int = 0, style: str = "") -> None:
    say(filled(text.replace("`", ""), WIDEST, hang=hang), style)
