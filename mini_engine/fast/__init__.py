"""The same products and attention, faster on a CPU, behind the same seams.

`prepare(model)` packs the model's products, FastBackend attends. An engine uses both where they apply;
docs/performance.md has the figures.
"""
