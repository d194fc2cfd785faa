"""The learner's commands: `python -m labs status`, `test`, `hint`, `demo`; and what the notebooks import."""
