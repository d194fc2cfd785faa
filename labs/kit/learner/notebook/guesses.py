"""Guesses: a question, the reader's answer, and the one that the run gave. Kindly judged."""

from typing import Any

from labs.kit.learner.notebook.words import cell, table


def check(guesses: dict[str, Any], answers: dict[str, Any], *, within: float = 0.1) -> None:
    """Print each question with the reader's guess and the answer that the run gave. Never raises.

    A guess left as `...` is fine. Numbers are close within that share of the answer; texts and lists
    must agree, capitals apart.
    """
    rows, all_open = [], True
    for question, answer in answers.items():
        guess = guesses.get(question, ...)
        all_open &= _is_open(guess)
        rows.append(
            {
                "question": question,
                "your guess": "-" if _is_open(guess) else cell(guess),
                "it is": cell(answer),
                "": _verdict(guess, answer, within),
            }
        )
    print(table(rows))
    if all_open:
        print(
            "\nNo guess yet, and that is fine. Put yours in place of the dots above and run both cells again."
        )


def _is_open(guess: object) -> bool:
    return guess is ... or guess is None or guess == ""


def _verdict(guess: object, answer: object, within: float) -> str:
    if _is_open(guess):
        return "no guess yet"
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        try:
            number = float(str(guess).strip().rstrip("%"))
        except ValueError:
            return "a number, please"
        if abs(number - answer) <= 0.005 * abs(answer):
            return "right"
        if abs(number - answer) <= within * abs(answer):
            return "close"
        return "it is more" if number < answer else "it is less"
    same = str(guess).strip().casefold() == str(answer).strip().casefold()
    return "right" if same else "not this time: see why below"
