"""Another right lab-07: the next chunk says who ends, a list for an inbox pointer, regular expressions."""

import re
from collections import deque
from collections.abc import Iterator

from mini_engine.interfaces import Row
from mini_engine.parts import NoWorkError
from mini_engine.scheduler import next_chunk
from mini_engine.text.detokenizer import Detokenizer


def step(engine):
    if len(engine.requests) == 0:
        raise NoWorkError("no requests")
    scheduled = engine.scheduler.schedule()
    rows = [(engine.requests[request_id], n) for request_id, n in scheduled.items()]
    rows = [Row(request, n, next_chunk(request, n).is_last) for request, n in rows]
    if not rows:
        queues = {"waiting": engine.scheduler.waiting, "running": engine.scheduler.running}
        counts = ", ".join(f"{name}={len(queue)}" for name, queue in queues.items())
        raise RuntimeError(f"no rows; {counts}")
    logits = engine.backend.forward(rows)
    ending = [request for request, _, is_last in rows if is_last]
    sampled, stopped = engine.sample(logits, ending) if ending else ({}, {})
    engine.scheduler.update(scheduled, sampled, stopped)
    return engine.collect(ending, stopped) if ending else []


class Stream(Iterator):
    def __init__(self, engine, request):
        self.engine, self.request, self.over = engine, request, False
        self.inbox = engine.inboxes[request.request_id] = deque()
        self.num_read = 0  # the inbox is kept whole

    def __next__(self):
        if self.over:
            raise StopIteration
        while self.num_read == len(self.inbox):
            self.engine.step()
        delta = self.inbox[self.num_read]
        self.num_read += 1
        if delta.finish_reason is not None:
            self.close()
        return delta

    def close(self):
        self.over = True
        self.unsubscribe()
        if self.engine.requests.get(self.request.request_id) is self.request:
            self.engine.abort(self.request.request_id)

    def unsubscribe(self):
        if self.engine.inboxes.get(self.request.request_id) is self.inbox:
            self.engine.inboxes.pop(self.request.request_id)


class OutputText:
    def __init__(self, tokenizer, stop, prompt=()):
        self.detokenizer = Detokenizer(tokenizer, prompt) if tokenizer else None
        self.text, self.num_given = "", 0
        self.whole = re.compile("|".join(map(re.escape, sorted(stop, key=len)))) if stop else None
        starts = sorted({s[:n] for s in stop for n in range(1, len(s))}, key=len, reverse=True)
        self.beginning = re.compile(f"(?:{'|'.join(map(re.escape, starts))})\\Z") if starts else None

    def feed(self, token_id):
        return self.append(self.detokenizer.feed(token_id)) if self.detokenizer else None

    def flush(self):
        return self.append(self.detokenizer.flush()) if self.detokenizer else None

    def append(self, text):
        self.text += text
        found = self.whole and self.whole.search(self.text)
        if not found:
            return None
        self.text = self.text[: found.start()]
        return found.group()

    def take(self, finished):
        doubtful = None if finished or not self.beginning else self.beginning.search(self.text)
        end = doubtful.start() if doubtful else len(self.text)
        given, self.num_given = self.text[self.num_given : end], end
        return given
