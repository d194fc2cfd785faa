"""`python -m labs`: the learner's and the author's tools; see labs/kit/cli.py."""

from labs.kit.cli import main

if __name__ == "__main__":
    main()
