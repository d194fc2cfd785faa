"""Another right lab-07: a step that keeps its notes by id, a generator inside the stream, text as a walk."""

from collections import deque
from collections.abc import Iterator

from mini_engine.interfaces import Row
from mini_engine.parts import NoWorkError
from mini_engine.text.detokenizer import Detokenizer


def step(engine):
    scheduler = engine.scheduler
    if not (len(scheduler.waiting) or scheduler.running):
        raise NoWorkError("nobody is here")
    scheduled = scheduler.schedule()
    if not scheduled:
        left = f"{len(scheduler.waiting)} are waiting, {len(scheduler.running)} running"
        raise RuntimeError(f"an empty schedule: {left}")
    # The other way to say who ends: whose progress will reach the whole length.
    rows, ends = [], {}
    for request_id in scheduled:
        request = engine.requests[request_id]
        if request.num_computed_tokens + scheduled[request_id] >= request.num_tokens:
            ends[request_id] = request
        rows.append(Row(request, scheduled[request_id], request_id in ends))
    sampled, stopped = engine.sample(engine.backend.forward(rows), list(ends.values()))
    scheduler.update(scheduled, sampled, stopped)
    return engine.collect([ends[request_id] for request_id in sampled], stopped)


class Stream(Iterator):
    def __init__(self, engine, request):
        self.engine, self.request = engine, request
        self.inbox = engine.inboxes[request.request_id] = deque()
        self.rest = self.unread()

    def unread(self):
        while True:
            while self.inbox:
                delta = self.inbox.popleft()
                if delta.finish_reason:
                    self.unsubscribe()
                yield delta
                if delta.finish_reason:
                    return
            yield None  # a generator that raises is over, so the step is not taken in it

    def __next__(self):
        while (delta := next(self.rest)) is None:
            self.engine.step()
        return delta

    def close(self):
        self.rest = iter(())
        self.unsubscribe()
        if not self.request.finish_reason:
            self.engine.abort(self.request.request_id)

    def unsubscribe(self):
        inboxes, request_id = self.engine.inboxes, self.request.request_id
        if inboxes.get(request_id) is self.inbox:
            del inboxes[request_id]


class OutputText:
    """Keeps only what was not given out; walks over it from the left."""

    def __init__(self, tokenizer, stop, prompt=()):
        self.detokenizer = Detokenizer(tokenizer, prompt) if tokenizer else None
        self.stop, self.pending = stop, ""

    def feed(self, token_id):
        return self.append(self.detokenizer.feed(token_id)) if self.detokenizer else None

    def flush(self):
        return self.append(self.detokenizer.flush()) if self.detokenizer else None

    def append(self, text):
        self.pending += text
        for start in range(len(self.pending)):
            for stop in sorted(self.stop):
                if self.pending.startswith(stop, start):
                    self.pending = self.pending[:start]
                    return stop
        return None

    def take(self, finished):
        at = 0 if not finished else len(self.pending)
        while at < len(self.pending) and not any(s.startswith(self.pending[at:]) for s in self.stop):
            at += 1
        given, self.pending = self.pending[:at], self.pending[at:]
        return given
