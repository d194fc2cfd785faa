"""The trace player: a component that steps through the decisions of a scheduler.

It is plain JavaScript and gets its data from outside. Its hosts are a single HTML file (`write_player`), a
Jupyter widget (widget.py), and a page to embed (`write_shell`). picture.py draws one step as SVG.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from mini_engine.show.player.cluster import with_idle
from mini_engine.show.player.example import ready_setup as ready_setup
from mini_engine.trace import Trace
from mini_engine.trace.file import write_whole
from mini_engine.trace.record import Record

SOURCES = ("dom", "fold", "compare", "words", "draw", "view", "ops", "player")
Texts = Mapping[str, tuple[str, Sequence[str]]]  # {request id: (prompt, a piece of text per output token)}


class Playable(Protocol):
    """A Trace, or a log of operations (labs 05 and 06) with the same three attributes."""

    @property
    def header(self) -> Record: ...
    @property
    def steps(self) -> Sequence[Record]: ...
    @property
    def end(self) -> Record | None: ...


def write_player(
    path: str | os.PathLike[str], trace: Playable, other: Playable | None = None, **options: Any
) -> Path:
    """Write the page for one trace, or for two side by side, and return its path.

    The options are those of `payload`; `#step=12&follow=r3` after the page's address sets step and request.
    """
    write_whole(path, player_html(trace, other, **options))
    return Path(path)


def write_cluster(path: str | os.PathLike[str], traces: Mapping[str, Trace]) -> Path:
    """Write the page for the engines of a cluster, one above the other, and return its path."""
    write_whole(path, _page(cluster_payload(traces)))
    return Path(path)


def player_html(trace: Playable, other: Playable | None = None, **options: Any) -> str:
    """Return the page of `write_player` as text. It loads nothing, and its policy forbids any request."""
    return _page(payload(trace, other, **options))


def _page(data: dict[str, Any]) -> str:
    code = script("page")
    parts = {
        "TITLE": escape(f"{' and '.join(one['name'] for one in data['traces'])} - trace player"),
        "HASH": f"sha256-{b64encode(sha256(code.encode()).digest()).decode()}",
        "DATA": _script_safe(data),
        "SCRIPT": code,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def write_shell(folder: str | os.PathLike[str]) -> Path:
    """Write shell.html, player.js and player.css, for a page that embeds the player and sends it traces by
    postMessage (see shell.js). Return the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("shell.html", "player.css", "player.js"):
        text = script("shell") if name == "player.js" else _asset(name)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def payload(
    trace: Playable,
    other: Playable | None = None,
    *,
    names: Sequence[str] = (),
    step: int | None = None,
    follow: str | None = None,
    texts: Texts | None = None,
    veil: bool = False,
    said: str = "",
) -> dict[str, Any]:
    """Return the component's data as JSON.

    `names` are the traces' titles. The player opens at `step` (the number in its record) and follows the
    request `follow`. With `texts` it shows each request's text so far. With `veil` its picture of the whole
    run ends at the last step that was shown. `said` stands above all.
    Raise ValueError if there is no step to play.
    """
    runs = [trace] if other is None else [trace, other]
    names = names or ("trace", "reference")
    if not any(run.steps for run in runs):
        raise ValueError(f"the trace {names[0]!r} has no steps to play; record a run first")
    traces = [_plain(name, run, texts) for name, run in zip(names, runs, strict=False)]
    return {"traces": traces, "step": step, "follow": follow, "veil": veil, "said": said}


def cluster_payload(
    traces: Mapping[str, Trace], *, step: int | None = None, follow: str | None = None
) -> dict[str, Any]:
    """Return the component's data for the engines of a cluster, by name, on one clock. `step` counts the
    moments at which the step of any engine begins. Raise ValueError if there is no step to play."""
    if not any(trace.steps for trace in traces.values()):
        raise ValueError("the engines have no steps to play; record a run first")
    runs = [_plain(name, trace, None) for name, trace in with_idle(traces).items()]
    return {"traces": runs, "step": step, "follow": follow, "veil": False, "said": "", "cluster": True}


def _plain(name: str, run: Playable, texts: Texts | None) -> dict[str, Any]:
    steps = [record.to_json() for record in run.steps]
    for step in steps:
        if "scheduled" in step:
            # Row order matters, and a JavaScript object puts keys that look like numbers first.
            step["scheduled"] = list(step["scheduled"].items())
    plain: dict[str, Any] = {"name": name, "header": run.header.to_json(), "steps": steps}
    plain["end"] = run.end and run.end.to_json()
    return plain if texts is None else {**plain, "texts": {key: list(text) for key, text in texts.items()}}


def script(host: str) -> str:
    """Return the component with one of its hosts (page, shell, widget) as JavaScript without global names.

    The widget's is a module; the shell's style is a separate file.
    """
    code = f"{component(with_style=host != 'shell')}\n{_asset(f'{host}.js')}"
    return code if host == "widget" else f'(() => {{\n"use strict";\n{code}}})();\n'


def component(with_style: bool = True) -> str:
    """Return the class Player as JavaScript, to precede the code of a host in one function."""
    style = f"const STYLE = {_script_safe(_asset('player.css'))};\n" if with_style else ""
    code = "\n".join(_asset(f"{name}.js") for name in SOURCES)
    return f"{style}const MARKUP = {_script_safe(_asset('markup.html'))};\n{code}"


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")


def _script_safe(data: Any) -> str:
    """Return JSON for a script element: it cannot contain `</script>` or `<!--`."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


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
