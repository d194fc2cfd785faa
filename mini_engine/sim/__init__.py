"""Schedules at scale without a model: policies to compare with, a cost model for time, workloads."""
