"""lab-11, the server's front: the reference, written to be read."""

import asyncio

from mini_engine.outputs import Delta


class EngineFullError(RuntimeError):
    """The front has as many open requests as it takes; try again later."""


class EngineClosedError(RuntimeError):
    """The engine serves no request any more."""


def settle(future, answer, error):
    """Given, for the event loop: give a future its answer, or its error. A future that is done stays."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(answer)


class AsyncEngine:
    """Serves an engine to any number of coroutines. Only the engine's thread may call the engine."""

    def __init__(self, engine, run, max_num_requests=4):
        """Given. engine: add_request(request), step(), abort(request_id), has_work; see README.md.

        run(function, *args) is awaited: it calls the function in the engine's thread, and returns what that
        returns. Meanwhile the event loop goes on. The thread has no other work.
        """
        self.engine, self.run, self.max_num_requests = engine, run, max_num_requests
        self.num_requests = 0  # open: waiting, running, or not read to the end
        self.commands = []  # [(function, future)]: the event loop appends to it, `serve` takes them all
        self.work = asyncio.Event()  # set when there is a command
        self.inboxes = {}  # {request_id: asyncio.Queue of Deltas}, of the requests that the engine has
        self.closed = None  # why no request is served any more
        self.loop = asyncio.get_running_loop()
        self.task = self.loop.create_task(self.serve())

    def tell(self, function, *args):
        """Given, for the engine's thread: have the event loop call a function. No other way leads there."""
        self.loop.call_soon_threadsafe(function, *args)

    async def close(self):
        """Given: end the engine between two steps. Requests that are open end with an error."""
        await self.send(self.end)

    def end(self):
        """Given, for the engine's thread."""
        self.closed = "the engine was closed"
        self.fail_all(self.closed)

    def send(self, function):
        """Have the engine's thread call a function, without arguments, before its next step.

        Return at once, with a future of this loop: it gets what the function returns or raises. To wait for
        it: `await self.send(function)`. Wakes `serve`, which may have nothing to do.
        Raises EngineClosedError(self.closed) if the engine is closed.
        """
        if self.closed is not None:
            raise EngineClosedError(self.closed)
        future = self.loop.create_future()
        self.commands.append((function, future))
        self.work.set()
        return future

    def turn(self, commands):
        """One turn, called in the engine's thread: all these commands, in order, and then one step.

        Each command is (function, future). Call the function, and `tell` the event loop at once:
        settle(future, answer, None), or settle(future, None, error) if it raised an Exception, which is its
        caller's business alone. A command may close the engine: those after it get an
        EngineClosedError(self.closed), and are not called.

        Then, if the engine is not closed and has_work, call engine.step(). It returns Deltas, each for the
        reader of its request_id: `tell` the event loop to put it into that one's inbox. The last Delta of a
        request has a finish_reason: then the engine no longer has it, and its id may be given to another.
        If the step raises an Exception, all open requests fail, with its type and its message as the reason:
        f"{type(error).__name__}: {error}". The engine can be used again afterwards.
        """
        for function, future in commands:
            answer, error = None, None
            try:
                if self.closed is not None:
                    raise EngineClosedError(self.closed)
                answer = function()
            except Exception as raised:
                error = raised
            self.tell(settle, future, answer, error)
        if self.closed is not None or not self.engine.has_work:
            return
        try:
            deltas = self.engine.step()
        except Exception as error:
            self.fail_all(f"{type(error).__name__}: {error}")
            return
        for delta in deltas:
            inbox = self.inboxes[delta.request_id]
            if delta.finish_reason is not None:
                del self.inboxes[delta.request_id]
            self.tell(inbox.put_nowait, delta)

    def fail_all(self, why):
        """End every request that the engine has; called in the engine's thread.

        First `tell` each of their readers: a last Delta(request_id, [], "", "error", error=why) into its
        inbox. Then abort each request. A broken engine may raise at the first abort; all readers know then.
        """
        inboxes, self.inboxes = self.inboxes, {}
        for request_id, inbox in inboxes.items():
            self.tell(inbox.put_nowait, Delta(request_id, [], "", "error", error=why))
        for request_id in inboxes:
            self.engine.abort(request_id)

    async def serve(self):
        """Let the engine take turn after turn, until it is closed. Runs as a task, from the beginning.

        A turn is `await self.run(self.turn, commands)`, with all commands that have come. The next one
        begins as soon as it is over, if the engine has work or a command has come meanwhile. Else wait for
        self.work, which does nothing until then.

        A turn that raises an Exception shows that the engine is broken (`fail_all` has given it to the
        readers): no turn follows, and self.closed says why. At the end, however it came, no command is left
        without an answer: those that no turn has taken get an EngineClosedError(self.closed).
        """
        try:
            while self.closed is None:
                if not self.engine.has_work:
                    await self.work.wait()
                self.work.clear()
                commands, self.commands = self.commands, []
                await self.run(self.turn, commands)
        except Exception as error:
            self.closed = f"the engine is broken: {type(error).__name__}: {error}"
        for _, future in self.commands:
            settle(future, None, EngineClosedError(self.closed))

    async def stream(self, request):
        """Yield the Deltas of a request, each as soon as it is there; the last has a finish_reason.

        Before anything else, at the first `anext`: EngineClosedError(self.closed) if the engine is closed,
        EngineFullError if max_num_requests are open. A request is open (num_requests) from here until its
        reader ends or leaves, however that happens.

        engine.add_request(request) is called in the engine's thread. It may raise (a ValueError if the id is
        in use, say): then the reader gets the error, and no one else notices. From then on, and not before,
        the request has its inbox.

        A reader that leaves early (is cancelled, or closes the stream) aborts its request, without waiting
        for it: num_requests is right at once, and engine.abort(request.request_id) is called before the next
        step. Not if the engine has finished the request meanwhile, and never the request of another reader
        that has the same id by then.
        """
        if self.closed is not None:
            raise EngineClosedError(self.closed)
        if self.num_requests >= self.max_num_requests:
            raise EngineFullError(f"{self.num_requests} requests are open, the most that are taken")
        inbox, request_id, finished = asyncio.Queue(), request.request_id, False

        def add():
            self.engine.add_request(request)
            self.inboxes[request_id] = inbox

        def abort():
            if self.inboxes.get(request_id) is inbox:
                del self.inboxes[request_id]
                self.engine.abort(request_id)

        self.num_requests += 1
        try:
            await self.send(add)
            while not finished:
                delta = await inbox.get()
                finished = delta.finish_reason is not None
                yield delta
        finally:
            self.num_requests -= 1
            if not finished and self.closed is None:
                self.send(abort)
