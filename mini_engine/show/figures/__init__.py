"""Figures of a trace, for notebooks, docs and the demo: one file per figure, shared parts in style.py.

matplotlib is imported when a figure is drawn. For every figure `<name>_data` returns the plotted data, to
test and to print.
"""

from mini_engine.show.figures.attention_mask import attention_mask, attention_mask_data, step_rows
from mini_engine.show.figures.block_map import block_map, block_map_data
from mini_engine.show.figures.budget import budget, budget_data
from mini_engine.show.figures.compare import compare, compare_data
from mini_engine.show.figures.itl_vs_threshold import itl_vs_threshold, itl_vs_threshold_data
from mini_engine.show.figures.ladder import ladder, ladder_data
from mini_engine.show.figures.latency import latency, latency_data
from mini_engine.show.figures.style import alt_text, counted, save
from mini_engine.show.figures.timeline import timeline, timeline_data
from mini_engine.show.figures.utilisation import utilisation, utilisation_data
from mini_engine.show.figures.waste import waste, waste_data

__all__ = [
    "alt_text", "attention_mask", "attention_mask_data", "block_map", "block_map_data", "budget",
    "budget_data", "compare", "compare_data", "counted", "itl_vs_threshold", "itl_vs_threshold_data",
    "ladder", "ladder_data", "latency", "latency_data", "save", "step_rows", "timeline", "timeline_data",
    "utilisation", "utilisation_data", "waste", "waste_data",
]  # fmt: skip
