"""`python -m labs`: the learner's and the author's tools; see labs/kit/learner/commands.py."""

from labs.kit.learner.commands import main

if __name__ == "__main__":
    main()
