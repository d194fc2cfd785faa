"""The failures of a lab's tests as a learner reads them, in place of a page of traceback."""

import inspect
from pathlib import Path

import pytest
from _pytest._code import code as shapes
from _pytest._code.code import ExceptionRepr, ReprEntryNative

from labs.kit.judge import loading
from labs.kit.judge.guard import PrintFlood, TimeUp, late
from labs.kit.judge.manifest import Lab
from labs.kit.judge.pristine import NOT_WRITTEN

ERROR_LINES, WIDEST = 12, 300  # of an error's message


class NotBegun(Exception):
    """A test is given up in advance."""


def in_words(lab: Lab, error: BaseException, seconds: float | None = None) -> list[str]:
    """Return at most two lines for a failure that needs no traceback; [] for all others."""
    reason: BaseException | None = error
    # NotImplementedError is a RuntimeError: a test that expects one may fail in another way afterwards.
    while reason is not None:
        kind = isinstance(reason, NotImplementedError | AssertionError)
        if kind and (found := NOT_WRITTEN.search(str(reason))):
            return [found[0], f"write it in labs/{lab.id}/starter.py; a hint: python -m labs hint {lab.id}"]
        reason = reason.__context__
    if isinstance(error, loading.LoadProblem | NotBegun):
        return [str(error)]
    if isinstance(error, TimeUp):
        line = loading.line_in_starter(error)
        where = f" It was in starter.py, line {line}." if line else ""
        return [f"{lab.id}: {late(error, seconds or lab.timeout)}{where}"]
    if isinstance(error, PrintFlood):
        return [f"{lab.id}: {error} in one step; print less, for example a line a step"]
    return []


def claim(item: pytest.Function) -> str:
    """Return the first line of a test's docstring: what it proves."""
    return (inspect.getdoc(item.function) or item.name).splitlines()[0]


def a_few_words(lines: list[str]) -> ExceptionRepr:
    text = ReprEntryNative(["\n".join(lines) + "\n"])
    place = shapes.ReprFileLocation("", 0, lines[0])
    return shapes.ReprExceptionInfo(shapes.ReprTraceback([text], None, "native"), place)


def short_traceback(
    opening: list[str], lab: Lab, excinfo: pytest.ExceptionInfo[BaseException], whole: bool
) -> ExceptionRepr:
    """Return the opening lines and pytest's short traceback of the lab's own files; a long message is cut."""
    ours = excinfo.traceback.filter(lambda entry: lab.path in Path(entry.path).parents)
    excinfo.traceback = ours or excinfo.traceback
    shown = excinfo.getrepr(style="short", chain=False)
    for entry in shown.reprtraceback.reprentries[-1:]:
        code = [line for line in entry.lines if not line.startswith("E ")]
        rest = entry.lines[len(code) :]
        message = [f"{line[:WIDEST]} ..." if len(line) > WIDEST else line for line in rest]
        if len(message) > ERROR_LINES and not whole:
            message[ERROR_LINES:] = ["E   ..."]
        entry.lines = [*code, *message]
    if shown.reprcrash:  # the line in the summary, which pytest does not cut where CI is set
        shown.reprcrash.message = shown.reprcrash.message.split("\n")[0][:WIDEST]
    first = ReprEntryNative([f"{line}\n" for line in opening])
    shown.reprtraceback.reprentries = [first, *shown.reprtraceback.reprentries]
    return shown
