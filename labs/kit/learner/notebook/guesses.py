"""Guesses: the reader answers a question, and only then sees the answer of the run."""

from collections.abc import Callable
from typing import Any

from labs.kit.learner.notebook.words import cell, table
from mini_engine.show.figures import counted


def check(guesses: dict[str, Any], answers: Callable[[], dict[str, Any]], *, within: float = 0.1) -> None:
    """Print each guess beside the run's answer; the answer to a question without a guess stays hidden.

    `answers()` makes the run. It is not called before there is a guess: a sentence says so. Its output is
    shown when no question is open. A guess left as `...` is open. A number within the share `within` of the
    answer is close; texts and lists must be equal, except for case.
    """
    from IPython.utils.capture import capture_output

    if all(map(_is_open, guesses.values())):
        print("No guess yet: replace the dots in the cell above, run it, and run this cell again.")
        return
    with capture_output() as run:
        found = answers()
    rows = []
    for question, answer in found.items():
        guess = guesses.get(question, ...)
        shown = ("-", "-") if _is_open(guess) else (cell(guess), cell(answer))
        verdict = _verdict(guess, answer, within)
        rows.append({"question": question, "your guess": shown[0], "it is": shown[1], "": verdict})
    print(table(rows))
    num_open = sum(_is_open(guesses.get(question, ...)) for question in found)
    if num_open:
        print(f"\n{counted(num_open, 'open question')}. The run is shown when each question has a guess.")
    else:
        print()
        run.show()


def _is_open(guess: object) -> bool:
    return guess is ... or guess is None or guess == ""


def _verdict(guess: object, answer: object, within: float) -> str:
    if _is_open(guess):
        return "no guess yet"
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        try:
            number = float(str(guess).strip().rstrip("%"))
        except ValueError:
            return "give a number"
        if abs(number - answer) <= 0.005 * abs(answer):
            return "right"
        if abs(number - answer) <= within * abs(answer):
            return "close"
        return "it is more" if number < answer else "it is less"
    same = str(guess).strip().casefold() == str(answer).strip().casefold()
    return "right" if same else "no: see below"
