"""What a learner runs: `python -m labs status`, `test`, `hint`, `demo`, and what the notebooks import."""
