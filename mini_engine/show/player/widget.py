"""The player as a Jupyter widget; it needs anywidget: pip install anywidget."""

from __future__ import annotations

from typing import Any, cast

import anywidget
import traitlets

from mini_engine.show.player import Playable, payload, script


class PlayerWidget(anywidget.AnyWidget):
    """One trace, or two side by side, in a notebook's cell.

    `step` (the number in its record) and `follow` (a request's id) are synchronised with the page in both
    directions. The options are those of `payload`; `show` plays other traces in the same place.
    """

    _esm = script("widget")
    payload = traitlets.Dict().tag(sync=True)
    step = traitlets.Int(None, allow_none=True).tag(sync=True)
    follow = traitlets.Unicode(None, allow_none=True).tag(sync=True)

    def __init__(self, trace: Playable, other: Playable | None = None, **options: Any) -> None:
        data = payload(trace, other, **options)
        super().__init__(payload=data, step=data["step"], follow=data["follow"])

    def show(self, trace: Playable, other: Playable | None = None, **options: Any) -> None:
        """Play these traces instead, from the given step or the beginning."""
        data = payload(trace, other, **options)
        with self.hold_sync():
            self.payload, self.step = data, data["step"]
            self.follow = cast("str | None", data["follow"] or self.follow)
