"""The arena in a web page. Its worker calls this as it calls the judge of a lab's page (browser/run.py)."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from labs.kit.arena.board import Row, by_game, front, known, ranking, row
from labs.kit.judge import clock


def tables(rows: Sequence[Row], yours: Row | None = None) -> dict[str, Any]:
    """Return what the page shows: two tables, the chart's points, and those on the front."""
    points = [(one.name, one.kind, one.fairness, one.goodput) for one in rows if one.scores]
    best = [(one.fairness, one.goodput) for one in front(rows)]
    return {"ranking": ranking(rows), "games": by_game(rows, yours), "points": points, "front": best}


def run(page: str, source: str, send: Callable[[str], object], columns: int, scale: float) -> str:
    """Play a policy: send the name of each game as it begins, and return the sentence or the tables."""
    clock.begin(scale, lambda: send(json.dumps({"alive": True})))
    try:
        mine = row("yours", source, said=lambda game: send(json.dumps({"begun": game})))
    except ValueError as error:
        return json.dumps({"foul": f"your file: {error}"})
    if mine.foul:
        return json.dumps({"foul": mine.foul})
    return json.dumps({"foul": "", **tables([mine, *known()], mine)})
