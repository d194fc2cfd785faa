"""Running a command line as a process: streams for any text, orderly ends by signals, errors in one line.

`mini-engine` and `python -m labs` are run by it.
"""

import os
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper


def run(app: Callable[[], object], complain: Callable[[str], object], *errors: type[Exception]) -> None:
    """Run `app`. Give an OSError, or one of `errors`, to `complain` as one line and exit with 2.

    Ctrl-C exits with 130 and SIGTERM with 143, also with one line. Both are raised as exceptions in the
    running code, so that its cleanup removes partial files and ends child processes.
    """
    for stream in (sys.stdout, sys.stderr):
        # A legacy console cannot print every character, and no stream a path that is not UTF-8.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    failures: tuple[type[Exception], ...] = (OSError, *errors)
    terminated = []

    def terminate(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
        terminated.append(True)
        sys.exit(143)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        app()
    except (SystemExit, KeyboardInterrupt) as ended:
        # typer turns Ctrl-C into an exit; code that waits outside Python may turn any signal into Ctrl-C.
        typers = getattr(ended.__context__, "__cause__", None)
        if terminated:
            complain("terminated (SIGTERM)")
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
    """Drop output that cannot be written; else Python would try again at exit, and print a traceback."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
