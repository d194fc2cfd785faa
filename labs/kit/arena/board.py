"""The arena's board: the scores of policies, which of them are on the front of the best, and the tables.

`python -m labs.kit.arena.board` plays the course's and the shipped policies, and writes scores.json.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from labs.kit.arena.course import COURSE
from labs.kit.arena.games import GAMES, ITL, TTFT, Game
from labs.kit.arena.play import decide, loaded
from labs.kit.arena.referee import Foul, Score, judged
from labs.kit.judge.guard import PrintFlood, TimeUp, deadline, kept_alive, late, limited_prints

SCORES = Path(__file__).with_name("scores.json")
SECONDS = 20.0  # that a policy may compute in one game
MEANING = (
    f"goodput: the requests whose first token came within {TTFT / 1000:g} s (in the workload priorities 0.5 "
    f"or 8 s) and each next one within {ITL:g} ms. fairness: 100% if all requests are slowed down alike. "
    "front: no other is better in both."
)
YOURS, SHIPPED, OF_COURSE = "yours", "shipped", "course"


@dataclass(frozen=True)
class Row:
    """A policy's scores, by game; or, if it broke a rule, the sentence. `kind` says whose it is."""

    name: str
    scores: dict[str, Score] = field(default_factory=dict)
    foul: str = ""
    kind: str = YOURS

    @property
    def goodput(self) -> float:
        """The mean over the games, from 0 to 1."""
        return sum(score.goodput for score in self.scores.values()) / len(GAMES)

    @property
    def fairness(self) -> float:
        """The mean over the games, from 0 to 1."""
        return sum(score.fairness for score in self.scores.values()) / len(GAMES)


def shipped() -> dict[str, str]:
    """Return the sources of the shipped policies, by name."""
    folder = SCORES.with_name("policies")
    return {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.py"))}


def play(policy: Any, game: Game, seed: int = 0) -> Score:
    """Play a game in this process. `policy` is a source, which is loaded anew, or a namespace.

    Raise Foul for a policy that breaks a rule, ValueError for a source that does not load.
    """
    try:
        with deadline(SECONDS), limited_prints(), kept_alive():
            decided = decide(loaded(policy) if isinstance(policy, str) else policy, game, seed)
    except TimeUp as error:
        raise Foul(late(error, SECONDS)) from None
    except PrintFlood as error:
        raise Foul(str(error)) from None
    return judged(game, seed, *decided)


def row(
    name: str,
    policy: Any,
    seed: int = 0,
    kind: str = YOURS,
    said: Callable[[str], object] = lambda game: None,
) -> Row:
    """Play all games, until one has a Foul. Raise ValueError for a source that does not load.

    `said` is called with the name of each game, before it is played.
    """
    scores = {}
    for game in GAMES:
        said(game.name)
        try:
            scores[game.name] = play(policy, game, seed)
        except Foul as foul:
            return Row(name, foul=f"{game.name}, {foul}", kind=kind)
    return Row(name, scores, kind=kind)


def known(seed: int = 0) -> Iterator[Row]:
    """Yield the rows of the course's policies and the shipped ones; those of seed 0 are stored."""
    stored = {} if seed else json.loads(SCORES.read_text("utf-8"))
    for kind, policies in (OF_COURSE, COURSE), (SHIPPED, shipped()):
        for name, policy in policies.items():
            if seed:
                yield row(name, policy, seed, kind)
            else:
                yield Row(name, {game: Score(*values) for game, values in stored[name].items()}, kind=kind)


def front(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that no other one equals or exceeds in both goodput and fairness, the fairest first."""
    best: list[Row] = []
    for one in sorted((row for row in rows if row.scores), key=lambda row: (-row.fairness, -row.goodput)):
        if not best or one.goodput > best[-1].goodput:
            best.append(one)
    return best


def ranking(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a table of the policies, best goodput first."""
    best = front(rows)
    table: list[tuple[str, ...]] = [("policy", "goodput", "fairness", "")]
    for one in sorted((row for row in rows if row.scores), key=lambda row: -row.goodput):
        cells = (one.name, percent(one.goodput), percent(one.fairness))
        table.append((*cells, "front" if one in best else ""))
    return table


def by_game(rows: Sequence[Row], yours: Row | None) -> list[tuple[str, ...]]:
    """Return a table of the games: the goodput of your policy, of fcfs, and of the best; your latencies."""
    scored = [row for row in rows if row.scores]
    fcfs = next(row for row in scored if row.name == "fcfs" and row.kind == OF_COURSE)
    shown = [yours, fcfs] if yours else [fcfs]
    table: list[tuple[str, ...]] = [("workload", *(one.name for one in shown), "best", "TTFT", "ITL")]
    for game in GAMES:
        best, score = max(scored, key=lambda row: row.scores[game.name].goodput), shown[0].scores[game.name]
        cells = [percent(one.scores[game.name].goodput) for one in shown]
        times = f"{score.ttft / 1000:.1f} s", f"{score.itl:.0f} ms"
        table.append((game.name, *cells, f"{percent(best.scores[game.name].goodput)} {best.name}", *times))
    return table


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def main() -> None:
    policies = {**COURSE, **shipped()}
    rows = [row(name, policy) for name, policy in policies.items()]
    if fouls := [f"{one.name}: {one.foul}" for one in rows if one.foul]:
        raise SystemExit("\n".join(fouls))
    lines = []
    for one in rows:
        scores = {game: [round(value, 4) for value in astuple(score)] for game, score in one.scores.items()}
        lines.append(f" {json.dumps(one.name)}: {json.dumps(scores)}")
    SCORES.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
