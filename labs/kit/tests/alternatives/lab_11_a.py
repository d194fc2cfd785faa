"""Another right lab-11: the thread is given one call at a time, the event loop does everything else."""

import asyncio

from mini_engine.outputs import Delta


class EngineFullError(RuntimeError):
    pass


class EngineClosedError(RuntimeError):
    pass


class AsyncEngine:
    def __init__(self, engine, run, max_num_requests=4):
        self.engine, self.run, self.max_num_requests = engine, run, max_num_requests
        self.num_requests, self.closed = 0, None
        self.calls, self.readers = asyncio.Queue(), {}
        self.task = asyncio.ensure_future(self.serve())

    def send(self, function):
        if self.closed:
            raise EngineClosedError(self.closed)
        answer = asyncio.get_running_loop().create_future()
        self.calls.put_nowait((function, answer))
        return answer

    async def turn(self, calls):
        for function, answer in calls:
            if self.closed:
                self.refuse(answer)
                continue
            try:
                value = await self.run(function)
            except Exception as error:
                if not answer.cancelled():
                    answer.set_exception(error)
            else:
                if not answer.cancelled():
                    answer.set_result(value)
        if self.closed or not self.engine.has_work:
            return
        try:
            deltas = await self.run(self.engine.step)
        except Exception as error:
            await self.fail_all(f"{type(error).__name__}: {error}")
        else:
            for delta in deltas:
                reader = self.readers[delta.request_id]
                reader.put_nowait(delta)
                if delta.finish_reason:
                    self.readers.pop(delta.request_id)

    def refuse(self, answer):
        if not answer.cancelled():
            answer.set_exception(EngineClosedError(self.closed))

    async def fail_all(self, why):
        failed = dict(self.readers)
        self.tell_readers(why)
        for request_id in failed:
            await self.run(self.engine.abort, request_id)

    def tell_readers(self, why):
        while self.readers:
            request_id, reader = self.readers.popitem()
            reader.put_nowait(Delta(request_id, [], "", finish_reason="error", error=why))

    async def serve(self):
        try:
            while not self.closed:
                calls = []
                if not self.engine.has_work:
                    calls.append(await self.calls.get())
                calls += [self.calls.get_nowait() for _ in range(self.calls.qsize())]
                await self.turn(calls)
        except Exception as error:
            self.closed = f"{type(error).__name__}: {error}"
            self.tell_readers(self.closed)
        while not self.calls.empty():
            self.refuse(self.calls.get_nowait()[1])

    async def close(self):
        def end():
            self.closed = "the engine was closed"

        await self.send(end)
        await self.fail_all(self.closed)

    async def stream(self, request):
        if self.closed:
            raise EngineClosedError(self.closed)
        if self.num_requests == self.max_num_requests:
            raise EngineFullError(self.num_requests)
        reader, last, name = asyncio.Queue(), None, request.request_id
        self.num_requests += 1
        try:
            await self.send(lambda: (self.engine.add_request(request), self.readers.update({name: reader})))
            while last is None or last.finish_reason is None:
                last = await reader.get()
                yield last
        finally:
            self.num_requests -= 1
            if not (last and last.finish_reason) and not self.closed:
                self.send(lambda: self.drop(name, reader))

    def drop(self, name, reader):
        if self.readers.get(name) is reader:
            self.engine.abort(name)
            self.readers.pop(name)
