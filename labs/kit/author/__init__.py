"""What authors and instructors run: `python -m labs check`, `generate`, `export`."""
