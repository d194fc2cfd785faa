"""nbval starts a kernel for each notebook; here one runs all of a process, and forgets the names of each.

To import torch and matplotlib takes longer than most notebooks' cells.
"""

import pytest

plugin = pytest.importorskip("nbval.plugin", reason="nbval is in the extra `dev`")
starts, running = plugin.RunningKernel, []


def kernel(*given, **named):
    if running and running[-1].is_alive():  # it is not where a cell took too long
        message = running[-1].execute_cell_input("%reset -f", allow_stdin=False)
        running[-1].await_reply(message)
        running[-1].await_idle(message, 60)
    else:
        running.append(starts(*given, **named))
    return running[-1]


plugin.RunningKernel = kernel
plugin.IPyNbFile.teardown = lambda self: None  # which would stop it


def pytest_sessionfinish():
    while running and (one := running.pop()).is_alive():
        one.stop()
