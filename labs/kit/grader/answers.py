"""A submission's claim: the form of its answer is checked here, in bounded memory, before it is compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO

from labs.kit.grader import frames
from labs.kit.judge.random_scripts import Step

PARSED, REASON = 4 << 20, 4096  # bytes of a reply that are in no right one, and so are parsed


@dataclass
class Answer:
    """A submission's claim: the logs of the scripts that came to their end, and why others did not."""

    logs: list[list[Step]]
    broken: str = ""  # the file does not load
    ended: str = ""
    in_hidden: bool = False  # it ended in the batch of hidden cases


def believed(text: str, ended: str, known: Sequence[Mapping[str, Step]]) -> Answer:
    """Return an answer whose form is checked; its content is only ever compared. `known` as in `run`."""
    *logs, rest = text.split("\n\n", len(known) + 1)
    left, answer = PARSED, Answer([], ended=ended)
    if logs and logs[0].startswith('{"broken"'):
        return Answer([], broken=broken(logs[0]))
    if len(logs) > len(known) or rest:
        return Answer([], ended="more was answered than was asked for" if not rest else "half an answer")
    for log, steps in zip(logs, known, strict=False):
        run = []
        try:
            for line in map(str.rstrip, StringIO(log)):
                if (found := steps.get(line)) is None:
                    left -= len(line)
                    if left < 0:
                        raise frames.BadFrame(f"more than {PARSED:,} bytes of it are wrong")
                    found = step(line)
                run.append(found)
            answer.logs.append(run)
        except frames.BadFrame as error:
            return Answer(answer.logs, ended=f"an answer that cannot be read: {error}"[:200])
    if len(logs) < len(known) and not ended:
        answer.ended = "it ended before all scripts were played"
    return answer


def broken(line: str) -> str:
    """Return the submission's claim why it does not load, which need not be true."""
    try:
        return str(frames.parsed(line[:REASON].encode())["broken"])[:300] or "without a reason"
    except frames.BadFrame as error:
        return f"why cannot be read: {error}"[:200]


def step(line: str) -> Step:
    """Return the step of a line. Raise BadFrame if it is none."""
    value = frames.parsed(line.encode())
    if isinstance(value, dict) and value.keys() == {"call", "seen"}:
        call, seen = value["call"], value["seen"]
        if isinstance(call, list) and call and isinstance(seen, dict):
            return Step(call, seen)
    raise frames.BadFrame("another form than a step has")
