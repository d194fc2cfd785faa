"""Clients of a front and a toy engine on the virtual clock of clock.py: lab-11's scripts call them.

A step of the engine takes 0.1 s, in which each of its first `slots` requests gets a token. After every call
of a script it can be seen what each client has read, and when.
"""

import asyncio
from collections import Counter
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from labs.kit.toys import plays
from labs.kit.toys.clock import TOGETHER, RestlessError, VirtualLoop
from labs.kit.toys.scripts import Skip
from labs.kit.toys.words import describe, kind
from mini_engine.outputs import Delta

STEP = 0.1  # seconds
AGES = 20.0  # seconds; a script has no more to compute
OUT_OF_MEMORY, GONE = "out of memory", "the device is gone"
REASONS = (OUT_OF_MEMORY, GONE, "the engine was closed")


@dataclass
class Asked:
    """A request as a client sends it."""

    request_id: str
    num_tokens: int
    client: str
    num_said: int = 0


class ToyEngine:
    """Gives each of its first requests a token a step. It notices where it is called from."""

    def __init__(self, loop: VirtualLoop, slots: int):
        self.loop, self.slots = loop, slots
        self.requests: dict[str, Asked] = {}
        self.computed: list[tuple[float, str]] = []  # tokens: when they were there, and for which client
        self.trouble, self.has_failed = "", False

    @property
    def has_work(self) -> bool:
        if self.loop.thread is None and self.loop.now < self.loop.free_at - TOGETHER:
            self.loop.fault("has_work is read in the event loop while the engine's thread is at work")
        return bool(self.requests)

    def add_request(self, request: Asked) -> None:
        self._in_thread("add_request")
        if request.request_id in self.requests:
            raise ValueError(f"{request.request_id} is in use")
        self.requests[request.request_id] = request

    def step(self) -> list[Delta]:
        self._in_thread("step")
        if not self.requests:
            self.loop.fault("step() is called with nothing to compute")
        if self.trouble:
            self.has_failed = True
            raise RuntimeError(self.trouble)
        self.loop.spend(STEP)
        deltas = []
        for name, asked in [*self.requests.items()][: self.slots]:
            self.computed.append((self.loop.time(), asked.client))
            text, asked.num_said = f"{asked.client}{asked.num_said}", asked.num_said + 1
            is_last = asked.num_said == asked.num_tokens
            deltas.append(Delta(name, [asked.num_said], text, "length" if is_last else None))
            if is_last:
                del self.requests[name]
        return deltas

    def abort(self, request_id: str) -> None:
        self._in_thread("abort")
        if self.has_failed and self.trouble == GONE:
            raise RuntimeError(self.trouble)
        if request_id not in self.requests:
            self.loop.fault(f"abort({request_id!r}) of a request that the engine does not have")
        self.requests.pop(request_id, None)
        if self.has_failed and not self.requests:
            self.trouble, self.has_failed = "", False

    def look(self, seconds: float) -> list[str]:
        """Return the requests that the engine has, after a while. Raise LookupError for a time below 0."""
        self._in_thread("look")
        if seconds < 0:
            raise LookupError("the past is not shown")
        self.loop.spend(seconds)
        return sorted(self.requests)

    def _in_thread(self, what: str) -> None:
        if self.loop.thread is None:
            self.loop.fault(f"{what}() is called in the event loop, not in the engine's thread")


@dataclass
class Client:
    """A client's own view: what it has read, and how it stands."""

    reads: int  # so many Deltas, then it does nothing until it is resumed
    read: list[str] = field(default_factory=list)
    state: str = "waits"
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None


class Clients:
    """The clients of the front that `part` makes."""

    def __init__(self, part: Any, config: dict[str, Any]):
        self.clients: dict[str, Client] = {}
        self.answers: dict[str, str] = {}
        self.loop = VirtualLoop()
        self.engine = ToyEngine(self.loop, config["slots"])
        with self.loop.running():
            self.front = part.AsyncEngine(self.engine, self.loop.run, config["max_num_requests"])
        self.advance(0)

    def advance(self, seconds: float) -> None:
        try:
            self.loop.advance(seconds)
        except RestlessError as restless:
            self.loop.fault(str(restless))
        if failed := self.failed(self.front.task):
            self.loop.fault(f"the task `serve` has ended with {describe(failed)}")
        of_clients = (self.failed(client.task) for client in self.clients.values())
        for error in [failed, *self.loop.faults, *of_clients]:
            if isinstance(error, NotImplementedError) or not isinstance(error, Exception | str | None):
                raise error

    @staticmethod
    def failed(task: "asyncio.Task[None] | None") -> BaseException | None:
        return task.exception() if task and task.done() and not task.cancelled() else None

    # ------------------------------------------------------------------------------------- the calls

    def open(self, name: str, request_id: str, num_tokens: int, reads: int = 99) -> None:
        """A client comes with a request; after so many Deltas it stops reading."""
        if name in self.clients:
            raise Skip
        client = self.clients[name] = Client(reads)
        client.task = self.loop.spawn(self.reading(client, Asked(request_id, num_tokens, name)))
        self.advance(0)

    async def reading(self, client: Client, asked: Asked) -> None:
        try:
            async with aclosing(self.front.stream(asked)) as stream:
                async for delta in stream:
                    client.read.append(self.words(delta))
                    if len(client.read) == client.reads and delta.finish_reason is None:
                        client.state = "does not read"
                        await client.goes_on.wait()
                        client.state = "waits"
            client.state = f"done at {self.now}"
        except asyncio.CancelledError:
            client.state = f"left at {self.now}"
            raise
        except NotImplementedError:
            raise
        except Exception as error:
            client.state = f"{kind(error)} at {self.now}"

    def resume(self, name: str) -> None:
        """A client that had stopped reading goes on."""
        if name not in self.clients or self.clients[name].state != "does not read":
            raise Skip
        with self.loop.running():
            self.clients[name].goes_on.set()
        self.advance(0)

    def leave(self, name: str) -> None:
        """A client is gone: whatever it waits for is cancelled, twice, as servers do."""
        client = self.clients.get(name)
        if client is None or client.task is None or client.task.done():
            raise Skip
        for _ in range(2):
            client.task.cancel()
            self.advance(0)

    def look(self, name: str, seconds: float) -> None:
        """Somebody asks the engine for its requests, which takes so many seconds, or fails below 0."""
        self.answers[name] = "waits"
        self.loop.spawn(self.looking(name, seconds))
        self.advance(0)

    async def looking(self, name: str, seconds: float) -> None:
        try:
            found = await self.front.send(lambda: self.engine.look(seconds))
            self.answers[name] = f"{' '.join(found) or 'none'} at {self.now}"
        except NotImplementedError as error:
            self.loop.fault(error)
        except Exception as error:
            self.answers[name] = f"{kind(error)} at {self.now}"

    def fail(self, reason: str) -> None:
        """The engine's next step fails; if the device is gone, all that follows does."""
        self.engine.trouble = reason

    def close(self) -> None:
        """Somebody closes the engine."""
        self.loop.spawn(self.closing())
        self.advance(0)

    async def closing(self) -> None:
        with suppress(Exception):
            await self.front.close()

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.advance(seconds)

    def drain(self) -> dict[str, list[str]]:
        """Let time pass until nothing is due. Return the clients that wait for what never comes."""
        self.advance(AGES)
        left = [name for name, client in self.clients.items() if client.state == "waits"]
        left += [name for name, answer in self.answers.items() if answer == "waits"]
        kept = [] if self.engine.trouble else sorted(self.engine.requests)
        return {"wait for ever": left, "left in the engine": kept}

    # ------------------------------------------------------------------------------- what is seen

    @property
    def now(self) -> str:
        return f"{self.loop.now:.2f} s"

    def words(self, delta: Delta) -> str:
        """Return a Delta as the log has it, with the time at which it was read."""
        if delta.finish_reason == "error":
            why = next((reason for reason in REASONS if reason in str(delta.error)), "no reason is given")
            return f"error at {self.now}: {why}"
        return f"{delta.text or 'no text'} at {self.now}{', the last' if delta.finish_reason else ''}"

    def seen(self) -> dict[str, Any]:
        """Return what can be seen after a call; times are of the virtual clock."""
        return {
            "time": self.now,
            "read": {name: [*client.read] for name, client in self.clients.items()},
            "clients": {name: client.state for name, client in self.clients.items()},
            "answers": dict(self.answers),
            "tokens computed": Counter(name for time, name in self.engine.computed if time <= self.loop.now),
            "num_requests": self.front.num_requests,
            "faults": [one if isinstance(one, str) else describe(one) for one in self.loop.faults],
        }


class Play(plays.Play):
    """The calls of a script: they go to the clients of a part's front, or to the world of the oracle."""

    def __init__(self, part: Any, config: dict[str, Any]):
        super().__init__(part)
        self.config = config
        self.played: Any = None

    def __getattr__(self, name: str) -> Any:
        if name == "played" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.begun(), name)

    def begun(self) -> Any:
        """Return what the calls go to, made at the first of them: by then it is known whose part it is."""
        if self.played is None:
            self.played = self.part.World(self.config) if self.is_oracle else Clients(self.part, self.config)
        return self.played

    def seen(self) -> Any:
        return self.begun().seen()
