"""Other ways to compute a step, to learn from and to compare with; the engine's own is in attention.py."""
