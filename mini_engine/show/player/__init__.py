"""The trace player: one HTML file, without any network, that steps through what a scheduler decided.

`write_player` puts page, style, scripts and trace into the file. The scripts are plain JavaScript:
fold.js (state at a step), words.js (sentences), draw.js (canvases), view.js (a trace's panel), main.js.
"""

import json
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from mini_engine.show.player.example import ready_setup
from mini_engine.trace import Trace

__all__ = ["player_html", "ready_setup", "write_player"]

SCRIPTS = ("fold.js", "words.js", "draw.js", "view.js", "main.js")


def write_player(
    path: str | os.PathLike[str],
    trace: Trace,
    other: Trace | None = None,
    *,
    names: tuple[str, ...] = (),
    step: int | None = None,
    follow: str | None = None,
) -> Path:
    """Write the page for one trace, or for two side by side; returns its path.

    `names` are the traces' titles on the page. It opens at `step` (the number in its record), following
    the request `follow`; `#step=12&follow=r3` after its address says the same. Raises ValueError when
    there is no step to play.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(player_html(trace, other, names=names, step=step, follow=follow), encoding="utf-8")
    return path


def player_html(
    trace: Trace,
    other: Trace | None = None,
    *,
    names: tuple[str, ...] = (),
    step: int | None = None,
    follow: str | None = None,
) -> str:
    """The page of `write_player`, as text."""
    traces = [trace] if other is None else [trace, other]
    names = names or ("trace", "reference")
    if not any(one.steps for one in traces):
        raise ValueError(
            f"the trace {names[0]!r} has no steps, so there is nothing to play; record a run first"
        )
    told = [_embed(name, one) for name, one in zip(names, traces, strict=False)]
    assets = files(__package__)
    parts = {
        "STYLE": (assets / "player.css").read_text("utf-8"),
        "DATA": _script_safe({"traces": told, "step": step, "follow": follow}),
        "SCRIPT": "\n".join((assets / name).read_text("utf-8") for name in SCRIPTS),
    }
    page = (assets / "player.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


def _embed(name: str, trace: Trace) -> dict[str, Any]:
    # Row order matters, and a JavaScript object puts keys that look like numbers first: pairs keep it.
    steps = [{**record.to_json(), "scheduled": list(record.scheduled.items())} for record in trace.steps]
    end = trace.end and trace.end.to_json()
    return {"name": name, "header": trace.header.to_json(), "steps": steps, "end": end}


def _script_safe(data: Any) -> str:
    """JSON that may stand in a script element: no `</script>` or `<!--` can appear in it."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
