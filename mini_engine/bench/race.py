"""The race: contestants take turns, so that a noisy machine disturbs all of them; medians are compared.

Each is a process of its own that computes only during its turn. Every turn is saved at once, with the CPU
time that other programs took meanwhile: an interrupted race is continued, not repeated.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mini_engine.bench.process import FLOOR, OURS, PeerError, Processes
from mini_engine.bench.quiet import Meanwhile, Watch, between, usage
from mini_engine.bench.workloads import Workload

SLOW = 25  # seconds of a turn from which a contestant skips rounds

Report = Callable[[str], None]


@dataclass(frozen=True)
class TimedRun:
    """One contestant's run in one round; `others` and `stolen` are cores (see quiet.py)."""

    round: int
    name: str
    seconds: float
    waited: float = 0
    others: float | None = None
    stolen: float | None = None


@dataclass
class Race:
    """One workload in one precision: all turns, and the tokens that each contestant gave."""

    workload: str
    dtype: str
    num_outputs: list[int]
    conditions: dict[str, Any] = field(default_factory=dict)  # a race under others starts anew
    turns: list[TimedRun] = field(default_factory=list)
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)  # by contestant: versions, settings
    failed: dict[str, str] = field(default_factory=dict)  # by contestant: the reason
    same: dict[str, tuple[int, float]] = field(default_factory=dict)  # agreement with the engine
    as_float32: dict[str, tuple[int, float]] = field(default_factory=dict)  # with the engine in float32
    floor: dict[str, float] = field(default_factory=dict)

    def seconds(self, name: str) -> dict[int, float]:
        """Return the seconds of a contestant's turns, by round."""
        return {turn.round: turn.seconds for turn in self.turns if turn.name == name}

    def names(self) -> list[str]:
        return list(dict.fromkeys(turn.name for turn in self.turns))

    def rate(self, name: str) -> float:
        """Return output tokens per second, of the median round."""
        return sum(self.num_outputs) / statistics.median(self.seconds(name).values())

    def ratios(self, name: str, baseline: str) -> list[float]:
        """Return how many times as fast as the baseline `name` was, in each round that both ran in."""
        ours, theirs = self.seconds(name), self.seconds(baseline)
        return [theirs[number] / ours[number] for number in ours if number in theirs]

    def agreement(self, name: str, tokens: list[list[int]]) -> tuple[int, float]:
        """Return how many requests gave these tokens, and the share of tokens before a first difference."""
        equal, before = 0, 0
        for ours, theirs in zip(self.tokens[name], tokens, strict=True):
            equal += ours == theirs
            pairs = enumerate(zip(ours, theirs, strict=True))
            before += next((i for i, (a, b) in pairs if a != b), len(ours))
        return equal, before / sum(self.num_outputs)

    def add(self, turn: TimedRun, said: dict[str, Any]) -> None:
        """Add a turn with the contestant's answer: its tokens, or the seconds of reading for the floor."""
        self.turns.append(turn)
        if turn.name == FLOOR:
            self.floor = {"reading": said["reading"], "num_steps": said["num_steps"]}
            return
        self.tokens[turn.name] = said["tokens"]
        if OURS in self.tokens:
            self.same[turn.name] = self.agreement(turn.name, self.tokens[OURS])

    def save(self, file: Path) -> None:
        """Write the race as JSON, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(file)

    @classmethod
    def read(cls, file: Path) -> "Race":
        return cls.parse(json.loads(file.read_text(encoding="utf-8")))

    @classmethod
    def parse(cls, said: dict[str, Any]) -> "Race":
        """Return the race of a JSON object, which has lists where there were tuples."""
        agreements = {
            key: {n: tuple(pair) for n, pair in said[key].items()} for key in ("same", "as_float32")
        }
        return cls(**said | agreements | {"turns": [TimedRun(**turn) for turn in said["turns"]]})


def resumed(race: Race, file: Path, report: Report) -> Race:
    """Return the race in the file if it is this one under the same conditions; else `race`."""
    if not file.exists():
        return race
    found = Race.read(file)
    if found.conditions != race.conditions or found.num_outputs != race.num_outputs:
        report(f"{file} was measured under other conditions: starting anew")
        return race
    found.failed.clear()  # they may do better today
    return found


def missing(race: Race, names: Iterable[str], rounds: int) -> list[tuple[int, str]]:
    """Return the turns (round, name) that are still to be run.

    Slow contestants skip rounds: one that needs SLOW seconds skips every second round, one that needs
    twice as many skips two of three, and so on.
    """
    done = {(turn.round, turn.name) for turn in race.turns}
    period = {turn.name: 1 + int(turn.seconds // SLOW) for turn in race.turns}
    left = [name for name in names if name not in race.failed]
    turns = [(n, name) for n in range(rounds) for name in left if n % period.get(name, 1) == 0]
    return [(n + 1, name) for n, name in turns if (n + 1, name) not in done]


def run(
    race: Race,
    load: Workload,
    names: list[str],
    rounds: int,
    processes: Processes,
    watch: Watch,
    report: Report,
    file: Path | None = None,
) -> Race:
    """Serve the workload in turns until every round is complete; `report` gets a line per turn.

    Each contestant first warms up. One that fails takes no further turn; `failed` has the reason.
    """
    warm: set[str] = set()
    while turns := missing(race, names, rounds):
        number, name = turns[0]
        try:
            if name not in warm:
                said = processes.serve(name, load.warm_up())
                race.about[name] = {key: said[key] for key in ("versions", "settings")}
                warm.add(name)
            said, meanwhile = take_turn(name, load, processes, watch)
        except PeerError as error:
            race.failed[name] = str(error)
            report(f"{name} has failed: {error}")
            continue
        race.add(TimedRun(number, name, said["seconds"], **asdict(meanwhile)), said)
        noise = "" if meanwhile.is_quiet else f" (others took {meanwhile.others:.2f} cores)"
        what = f"{race.workload} {race.dtype}, round {number} of {rounds}"
        report(f"{what}: {name} {said['seconds']:.2f} s{noise}")
        if file:
            race.save(file)
    return race


def take_turn(name: str, load: Workload, peers: Processes, watch: Watch) -> tuple[dict[str, Any], Meanwhile]:
    """Wait for a quiet machine; return one contestant's answer and the noise meanwhile. Raises PeerError."""
    watch.groups = peers.groups(name)
    waited = watch.wait()
    start = usage(watch.groups)
    said = peers.serve(name, load)
    meanwhile = between(start, usage(watch.groups), waited)
    lengths = [len(tokens) for tokens in said.get("tokens", [])]
    if lengths and lengths != load.num_outputs:
        raise PeerError(f"gave {sum(lengths)} tokens, but {sum(load.num_outputs)} were asked for")
    return said, meanwhile
