"""The backends of the baselines: two passes a step, or the padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from mini_engine.attention import NextChunk, PagedBackend
from mini_engine.backends.padded import PaddedBackend
from mini_engine.fast.attention import paged_backend
from mini_engine.interfaces import KVManager, Row
from mini_engine.model import CausalLM
from mini_engine.schedule_step import next_chunk
from mini_engine.sim.baselines import BASELINES


class TwoPassBackend:
    """Prefill chunks and decodes in separate model calls, each on the paged pool."""

    name = "two-pass"
    writes_before_reading = True  # the passes are computed in the order of their rows

    def __init__(self, model: CausalLM, kv: KVManager, next_chunk: NextChunk = next_chunk):
        self.paged = paged_backend(model, kv, next_chunk)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Compute the scheduled rows. Return logits (S, vocab_size) of the S that end their sequence."""
        # Runs of one kind keep the order of the schedule: under TwoPass, decodes come first.
        passes = groupby(rows, key=lambda row: row.request.is_decode)
        return torch.cat([self.paged.forward(list(part)) for _, part in passes])


BACKENDS = {backend.name: backend for backend in (PagedBackend, TwoPassBackend, PaddedBackend)}


def baseline_parts(baseline: str) -> dict[str, Any]:
    """Return the parts of an engine under one of BASELINES: `Parts(**baseline_parts("static"))`.

    The padded one needs enable_prefix_caching=False.
    """
    chosen = BASELINES[baseline]
    return {"Scheduler": chosen.scheduler, "attend_backend": BACKENDS[chosen.backend]}
