"""Simulation without a model: the real scheduler, baselines to compare with, a cost model, workloads."""
