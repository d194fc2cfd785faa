"""The trace player: one component that steps through what a scheduler decided, wherever people are.

It is plain JavaScript, fed from outside, and has four hosts: a single HTML file (`write_player`), a Jupyter
widget (widget.py), a page to be embedded (`write_shell`), and a picture of one step (picture.py).
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from mini_engine.show.player.example import ready_setup
from mini_engine.trace.file import write_whole
from mini_engine.trace.record import Record

__all__ = [
    "Playable",
    "Texts",
    "component",
    "payload",
    "player_html",
    "ready_setup",
    "script",
    "write_player",
    "write_shell",
]

SOURCES = ("dom", "fold", "compare", "words", "draw", "view", "ops", "player")
Texts = Mapping[str, tuple[str, Sequence[str]]]  # request id: its prompt, and a piece of text an output token


class Playable(Protocol):
    """A Trace; or a log of operations, as labs 05 and 06 keep it, with the same three attributes."""

    @property
    def header(self) -> Record: ...
    @property
    def steps(self) -> Sequence[Record]: ...
    @property
    def end(self) -> Record | None: ...


def write_player(
    path: str | os.PathLike[str], trace: Playable, other: Playable | None = None, **options: Any
) -> Path:
    """Write the page for one trace, or for two side by side; returns its path.

    The options are those of `payload`; `#step=12&follow=r3` after the page's address says the same.
    """
    write_whole(path, player_html(trace, other, **options))
    return Path(path)


def player_html(trace: Playable, other: Playable | None = None, **options: Any) -> str:
    """The page of `write_player`, as text: all that it needs is in it, and its policy forbids the rest."""
    data = payload(trace, other, **options)
    code = script("page")
    parts = {
        "TITLE": escape(f"{' and '.join(one['name'] for one in data['traces'])} - trace player"),
        "HASH": f"sha256-{b64encode(sha256(code.encode()).digest()).decode()}",
        "DATA": _script_safe(data),
        "SCRIPT": code,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def write_shell(folder: str | os.PathLike[str]) -> Path:
    """Write shell.html, player.js and player.css, for a page that embeds the player and feeds it by
    postMessage (shell.html says how); returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("shell.html", _asset("shell.html")),
        ("player.css", _asset("player.css")),
        ("player.js", script("shell")),
    ):
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
) -> dict[str, Any]:
    """What the component is fed, as JSON.

    `names` are the traces' titles. It opens at `step` (the number in its record), following the request
    `follow`. With `texts`, each request's text so far is shown, too. With `veil`, the picture of the whole
    run ends at the furthest step that was looked at. Raises ValueError when there is no step to play.
    """
    runs = [trace] if other is None else [trace, other]
    names = names or ("trace", "reference")
    if not any(run.steps for run in runs):
        raise ValueError(
            f"the trace {names[0]!r} has no steps, so there is nothing to play; record a run first"
        )
    traces = [_plain(name, run, texts) for name, run in zip(names, runs, strict=False)]
    return {"traces": traces, "step": step, "follow": follow, "veil": veil}


def _plain(name: str, run: Playable, texts: Texts | None) -> dict[str, Any]:
    steps = [record.to_json() for record in run.steps]
    for step in steps:
        if "scheduled" in step:
            # Row order matters, and a JavaScript object puts keys that look like numbers first.
            step["scheduled"] = list(step["scheduled"].items())
    told = {
        "name": name,
        "header": run.header.to_json(),
        "steps": steps,
        "end": run.end and run.end.to_json(),
    }
    return told if texts is None else {**told, "texts": {key: list(text) for key, text in texts.items()}}


def script(host: str) -> str:
    """The component with one of its hosts (page, shell, widget), as JavaScript without a global name.

    That of the widget is a module; the shell has its style in a file of its own.
    """
    code = f"{component(with_style=host != 'shell')}\n{_asset(f'{host}.js')}"
    return code if host == "widget" else f'(() => {{\n"use strict";\n{code}}})();\n'


def component(with_style: bool = True) -> str:
    """The class Player as JavaScript, for another host to stand below it in one function."""
    style = f"const STYLE = {_script_safe(_asset('player.css'))};\n" if with_style else ""
    code = "\n".join(_asset(f"{name}.js") for name in SOURCES)
    return f"{style}const MARKUP = {_script_safe(_asset('markup.html'))};\n{code}"


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")


def _script_safe(data: Any) -> str:
    """JSON that may stand in a script element: no `</script>` or `<!--` can appear in it."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
