"""What `trace play` finds in files beside the traces themselves: what to call them, and what was said."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mini_engine.show.player import Texts
from mini_engine.trace import Trace


def titles(paths: Sequence[Path], traces: Sequence[Trace]) -> tuple[str, ...]:
    """Two traces are called after how they schedule; one, or two that schedule alike, after their files."""
    how = [trace.header.parts.get("Scheduler") or trace.header.config["policy"] for trace in traces]
    if len(traces) == 1 or len(set(how)) < len(how):
        return tuple(map(str, paths))
    return tuple(how)


def read_texts(path: Path, trace: Trace) -> Texts | None:
    """The texts.json beside a trace, as `demo` writes it: {id: [prompt, a piece of text each token]}.

    None where there is none, or where it is another run's: one piece more or less is all that may differ.
    """
    try:
        texts = json.loads(path.with_name("texts.json").read_text("utf-8"))
        said = {
            name: (str(prompt), [str(piece) for piece in pieces]) for name, (prompt, pieces) in texts.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    tokens = Counter({view.request_id: view.num_output_tokens for view in trace.header.requests})
    for record in trace.steps:
        tokens.update({name: len(ids) for name, ids in record.new_tokens.items()})
    same = set(tokens) <= set(said) and all(abs(len(said[name][1]) - n) <= 1 for name, n in tokens.items())
    return said if same else None
