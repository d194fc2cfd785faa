"""Another right lab-11: readers are objects with an Event, and a step's Deltas come in one call."""

import asyncio
from contextlib import contextmanager

from mini_engine.outputs import Delta


class EngineFullError(RuntimeError):
    pass


class EngineClosedError(RuntimeError):
    pass


class Reader:
    """The Deltas that have come for one reader, and whether the engine still has its request."""

    def __init__(self, request):
        self.request, self.deltas, self.come, self.in_engine = request, [], asyncio.Event(), False

    def give(self, delta):
        self.deltas.append(delta)
        self.come.set()

    async def all(self):
        """Wait until there is something, and take it."""
        await self.come.wait()
        self.come.clear()
        deltas, self.deltas = self.deltas, []
        return deltas


class AsyncEngine:
    def __init__(self, engine, run, max_num_requests=4):
        self.engine, self.run, self.most = engine, run, max_num_requests
        self.num_requests, self.why = 0, ""
        self.waiting, self.readers = [], []  # readers of requests that the engine has
        self.loop, self.idle = asyncio.get_running_loop(), None
        self.task = self.loop.create_task(self.serve())

    def send(self, function):
        if self.why:
            raise EngineClosedError(self.why)
        future = self.loop.create_future()
        self.waiting.append((function, future))
        if self.idle and not self.idle.done():
            self.idle.set_result(None)
        return future

    def later(self, *calls):
        def do():
            for function, *args in calls:
                function(*args)

        if calls:
            self.loop.call_soon_threadsafe(do)

    def turn(self, commands):
        for function, future in commands:
            try:
                if self.why:
                    raise EngineClosedError(self.why)
                self.later((self.settle, future, function(), None))
            except Exception as error:
                self.later((self.settle, future, None, error))
        if self.why or not self.engine.has_work:
            return
        try:
            made = {delta.request_id: delta for delta in self.engine.step()}
        except Exception as error:
            self.fail_all(f"{type(error).__name__}: {error}")
            return
        given = [
            (reader, made[name]) for reader in self.readers if (name := reader.request.request_id) in made
        ]
        self.readers = [reader for reader in self.readers if self.goes_on(reader, made)]
        self.later(*((reader.give, delta) for reader, delta in given))

    def goes_on(self, reader, made):
        delta = made.get(reader.request.request_id)
        reader.in_engine = delta is None or delta.finish_reason is None
        return reader.in_engine

    def settle(self, future, value, error):
        if future.cancelled():
            return
        future.set_exception(error) if error else future.set_result(value)

    def fail_all(self, why):
        failed, self.readers = self.readers, []
        self.later(*((r.give, Delta(r.request.request_id, [], "", "error", error=why)) for r in failed))
        for reader in failed:
            reader.in_engine = False
            self.engine.abort(reader.request.request_id)

    async def serve(self):
        try:
            while not self.why:
                if not self.waiting and not self.engine.has_work:
                    self.idle = self.loop.create_future()
                    await self.idle
                commands = self.waiting[:]
                del self.waiting[:]
                await self.run(self.turn, commands)
        except Exception as error:
            self.why = f"{type(error).__name__}: {error}"
            for reader in self.readers:
                reader.give(Delta(reader.request.request_id, [], "", "error", error=self.why))
        finally:
            for _, future in self.waiting:
                self.settle(future, None, EngineClosedError(self.why))

    async def close(self):
        def end():
            self.why = "the engine was closed"
            self.fail_all(self.why)

        await self.send(end)

    @contextmanager
    def place(self):
        if self.why:
            raise EngineClosedError(self.why)
        if self.num_requests + 1 > self.most:
            raise EngineFullError
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    async def stream(self, request):
        with self.place():
            reader = Reader(request)
            try:
                await self.send(lambda: self.begin(reader))
                while True:
                    for delta in await reader.all():
                        yield delta
                        if delta.finish_reason:
                            return
            finally:
                if not self.why:
                    self.send(lambda: self.end(reader))

    def begin(self, reader):
        self.engine.add_request(reader.request)
        reader.in_engine = True
        self.readers.append(reader)

    def end(self, reader):
        if reader.in_engine:
            reader.in_engine = False
            self.readers.remove(reader)
            self.engine.abort(reader.request.request_id)
