"""Grades submissions: students' code runs in a sandbox, and all that decides runs outside of it."""
