"""`python -m labs`: the learner's commands, and the author's where this edition of the course has them."""

import sys
from importlib.util import find_spec
from io import TextIOWrapper

from labs.kit.judge.manifest import LabError
from labs.kit.learner.commands import app
from labs.kit.learner.screen import App, complain


def every_command() -> App:
    """The learner's commands, and those of authors and instructors where this edition has them."""
    if find_spec("labs.kit.author"):  # the student edition has none
        from labs.kit.author.commands import check, export, generate

        for command in (check, generate, export):
            app.command()(command)
    if find_spec("labs.kit.browser"):  # nor this: its texts are read as they are
        from labs.kit.browser.commands import open_site

        app.command("open")(open_site)
    if find_spec("labs.kit.grader"):  # nor this
        from labs.kit.grader.commands import COMMANDS

        for command in COMMANDS:
            app.command()(command)
    return app


def main() -> None:
    """Run a command; what is wrong with its arguments, a lab or the disk is one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter shows a question mark
    try:
        every_command()(prog_name="python -m labs")
    except (LabError, OSError) as error:
        complain(str(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
