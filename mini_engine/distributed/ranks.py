"""The processes that torchrun starts, as ranks: the others do what rank 0 says, and no error hangs them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch does not list them

Result = TypeVar("Result")
FOREVER = timedelta(days=365)  # a rank waits for rank 0 while no request comes
LONGEST_SUM = timedelta(minutes=5)  # for a machine that vanishes; a process that ends is noticed at once
FAILURE = "failure"


class ParallelError(RuntimeError):
    """A rank has failed, and with it all; the message is that of the first one."""


class Ranks:
    """This process among `size` of torchrun's. Raises ValueError unless torchrun has started so many.

    The first failure of any rank is put in the store that torchrun keeps. A thread of each rank waits for it:
    ranks other than 0 end there and then, and rank 0 raises ParallelError in the call that it is in or next.
    """

    def __init__(self, size: int):
        started = os.environ.get("WORLD_SIZE")
        if started is None or "RANK" not in os.environ:
            how = f"torchrun --standalone --nproc-per-node {size} -m mini_engine ..."
            raise ValueError(f"tensor_parallel_size {size} needs {size} processes; start them with: {how}")
        if int(started) != size:
            raise ValueError(f"tensor_parallel_size is {size}, but torchrun has started {started} processes")
        self.size, self.rank = size, int(os.environ["RANK"])
        self.failure: str | None = None
        self._has_failed = False  # this rank; then it ends by itself
        self._agreed = False  # whether a call that all ranks make is under way
        self.num_sums, self.sum_seconds, self.seconds = 0, 0.0, 0.0  # of the sums, and of rank 0's calls
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(kind, timeout=FOREVER)
        self._sums = dist.new_group(timeout=LONGEST_SUM)
        self._store = _store()
        Thread(target=self._watch, name="ranks", daemon=True).start()

    @property
    def device_index(self) -> int:
        """The GPU of this process on its machine, if there are any."""
        return int(os.environ.get("LOCAL_RANK", self.rank))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        first = None if error is None or isinstance(error, ParallelError) else self.fail(error)
        with suppress(ValueError):  # in another thread than the main one
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which would interrupt what follows
        with suppress(RuntimeError, ConnectionError):
            if error is None and self.failure is None and self.rank == 0:
                self._send(None)
            dist.destroy_process_group()  # without it the process may end by an abort
        if first is not None and self.rank:
            _end(f"error: {first}")
        if error is None and self.failure is not None:  # a server answers its clients until it is ended
            raise ParallelError(self.failure)

    # ------------------------------------------------------------------------------------- rank 0

    def everywhere(
        self,
        name: str,
        call: Callable[..., Result],
        sent: Callable[..., tuple[Any, ...]] = lambda *args: args,
    ) -> Callable[..., Result]:
        """Return `call` so that the other ranks make it, too, under a name and with the arguments `sent`.

        In a call that all ranks make already it is the call itself. Raises ParallelError when a rank fails.
        """

        def agreed(*args: Any) -> Result:
            if self._agreed:
                return call(*args)
            with self._guarded():
                self._send((name, sent(*args)))
                return call(*args)

        return agreed

    def _send(self, command: tuple[str, tuple[Any, ...]] | None) -> None:
        with _connected("another rank"):
            dist.broadcast_object_list([command], src=0)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        if self.failure is not None:
            raise ParallelError(self.failure)
        self._agreed, began = True, time.perf_counter()
        try:
            yield
        except BaseException as error:
            first = self.fail(error)
            if not isinstance(error, Exception):
                raise
            raise ParallelError(first) from error
        finally:
            self._agreed = False
            self.seconds += time.perf_counter() - began

    def cost(self, num_layers: int) -> str:
        """Return a sentence on what the sums have cost; a model has two in each layer."""
        a_step = 2 * num_layers
        steps = max(1, self.num_sums // a_step)
        each, of = (f"{1000 * seconds / steps:.1f}" for seconds in (self.sum_seconds, self.seconds))
        return f"{steps} steps of {a_step} all-reduces on {self.size} ranks: {each} of a step's {of} ms"

    # --------------------------------------------------------------------------------- every rank

    def sum(self, part: Tensor) -> Tensor:
        """Add up the parts of all ranks, in place, and return the sum, the same bits on every rank."""
        began = time.perf_counter()
        with _connected("another rank"):
            dist.all_reduce(part, group=self._sums)
        self.num_sums += 1
        self.sum_seconds += time.perf_counter() - began
        return part

    def obey(self, calls: Callable[[str], Callable[..., object]]) -> None:
        """Make rank 0's calls, found by their names, until it ends. Raises ConnectionError if it dies."""
        while True:
            heard: list[Any] = [None]
            with _connected("rank 0"):
                dist.broadcast_object_list(heard, src=0)
            if heard[0] is None:
                return
            name, args = heard[0]
            calls(name)(*args)

    def fail(self, error: BaseException) -> str:
        """End all ranks. Return the message of the first that failed, which need not be this one."""
        self._has_failed = True
        mine = f"rank {self.rank}: {type(error).__name__}: {error}"
        try:
            self.failure = self._store.compare_set(FAILURE, "", mine).decode()
        except RuntimeError:  # the store is gone, too
            self.failure = mine
        return self.failure

    def _watch(self) -> None:
        try:
            store = _store()
            store.wait([FAILURE], FOREVER)
            self.failure = store.get(FAILURE).decode()
        except RuntimeError:  # torchrun has ended
            return
        if self.rank and not self._has_failed:
            _end(f"rank {self.rank} ends: {self.failure}")


def _end(why: str) -> NoReturn:
    """End this process at once: its main thread may wait for a rank that does not come."""
    print(why, file=sys.stderr, flush=True)
    os._exit(1)


def _store() -> PrefixStore:
    """Return a connection to the store of this start; a connection that waits serves no other call."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"mini-engine/{start}", TCPStore(host, port, is_master=False))


@contextmanager
def _connected(to: str) -> Iterator[None]:
    """Turn gloo's error into a ConnectionError, without the file names before it and the advice after it."""
    try:
        yield
    except RuntimeError as error:
        why = str(error).partition("] ")[2].partition(". ")[0] or str(error)
        raise ConnectionError(f"the connection to {to} is lost ({why})") from None
