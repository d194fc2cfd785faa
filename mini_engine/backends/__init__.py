"""Other ways to compute a step, to learn from and to compare with.

The engine's own backend is in attention.py.
"""
