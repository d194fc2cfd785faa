"""`python -m labs`: the learner's and the author's tools; see labs/kit/cli.py."""

from labs.kit.cli import app

if __name__ == "__main__":
    app(prog_name="python -m labs")
