"""The titles and texts of traces for `trace play`, from their files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mini_engine.show.player import Texts
from mini_engine.trace import Trace


def titles(paths: Sequence[Path], traces: Sequence[Trace]) -> tuple[str, ...]:
    """Return titles: the schedulers of two traces if they differ, else the names of the files."""
    how = [trace.header.parts.get("Scheduler") or trace.header.config["policy"] for trace in traces]
    if len(traces) == 1 or len(set(how)) < len(how):
        return tuple(map(str, paths))
    return tuple(how)


def read_texts(path: Path, trace: Trace) -> Texts | None:
    """Return the texts.json beside a trace, as `demo` writes it: {id: [prompt, a piece of text per token]}.

    None if there is none, or if it is of another run: its pieces may differ from the tokens by one.
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
