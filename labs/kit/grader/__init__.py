"""Grades submissions: what is a student's runs in a sandbox, and what decides runs outside of it."""
