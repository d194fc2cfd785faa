"""Races against other engines, on the same weights and prompts, each in a process of its own."""
