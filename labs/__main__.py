"""`python -m labs`: the learner's commands, and the author's where this edition of the course has them."""

from functools import cache
from importlib.util import find_spec

from labs.kit.judge.manifest import LabError
from labs.kit.learner.commands import app
from labs.kit.learner.screen import App, complain
from mini_engine.commands.common import BadOutput
from mini_engine.commands.process import run


@cache  # it adds to the learner's commands, once
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
    else:
        from labs.kit.arena.commands import arena

        app.command()(arena)
    return app


def main() -> None:
    """Run a command; what is wrong with its arguments, a lab or the disk is one line on stderr."""
    run(lambda: every_command()(prog_name="python -m labs"), complain, LabError, BadOutput)


if __name__ == "__main__":
    main()
