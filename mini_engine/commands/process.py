"""A command line as a process: its streams take any text, a signal ends it as an error does, and what goes
wrong is one line. `mini-engine` and `python -m labs` are run by it.
"""

import os
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import NoReturn


def run(app: Callable[[], object], complain: Callable[[str], object], *errors: type[Exception]) -> None:
    """Run `app`; an OSError, or one of `errors`, is given to `complain` as one line, and ends it with 2.

    Ctrl-C ends it with 130, SIGTERM with 143, as one line too. Both are raised where the program is, so that
    what was half-written is removed, and what was started is ended, on the way out.
    """
    for stream in (sys.stdout, sys.stderr):
        # A legacy console cannot print every character, and no stream a path that is no UTF-8.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    failures: tuple[type[Exception], ...] = (OSError, *errors)
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        app()
    except KeyboardInterrupt:
        complain("interrupted")
        sys.exit(130)
    except Terminated:
        complain("ended by SIGTERM")
        raise
    except SystemExit as ended:
        if isinstance(getattr(ended.__context__, "__cause__", None), KeyboardInterrupt):  # typer's exit of it
            complain("interrupted")
        raise
    except failures as error:
        complain(" ".join(str(error).split()) or type(error).__name__)
        sys.exit(2)
    finally:
        _drop_unwritten()
        signal.signal(signal.SIGTERM, before)


class Terminated(SystemExit):
    """SIGTERM came."""


def _terminated(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: cleaning up is not cut short
    raise Terminated(143)


def _drop_unwritten() -> None:
    """What could not be written by now never will be; Python would try once more, and print a traceback."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
