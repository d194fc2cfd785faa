"""The arena: a scheduling policy in a file, against the course's, on eight seeded workloads."""
