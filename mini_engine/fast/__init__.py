"""The same products and attention, quicker on a CPU, behind the same seams.

`prepare(model)` gives the model its packed products, FastBackend the attention. Both take the place of
model.py and attention.py by themselves where they apply; docs/performance.md has the figures.
"""
