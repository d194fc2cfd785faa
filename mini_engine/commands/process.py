"""A command line as a process: its streams take any text, a signal ends it as an error does, and what goes
wrong is one line. `mini-engine` and `python -m labs` are run by it.
"""

import os
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper


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
    terminated = []

    def terminate(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: cleaning up is not cut short
        terminated.append(True)
        sys.exit(143)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        app()
    except (SystemExit, KeyboardInterrupt) as ended:
        # typer makes an exit of Ctrl-C, and others, waiting in another language, take any signal for that.
        typers = getattr(ended.__context__, "__cause__", None)
        if terminated:
            complain("ended by SIGTERM")
            sys.exit(143)
        if isinstance(ended, KeyboardInterrupt) or isinstance(typers, KeyboardInterrupt):
            complain("interrupted")
            sys.exit(130)
        raise
    except failures as error:
        complain(" ".join(str(error).split()) or type(error).__name__)
        sys.exit(2)
    finally:
        _drop_unwritten()
        signal.signal(signal.SIGTERM, before)


def _drop_unwritten() -> None:
    """What could not be written by now never will be; Python would try once more, and print a traceback."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
