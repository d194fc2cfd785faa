"""Another right lab-07: keywords everywhere, a Stream that is no Iterator, only what is held back is kept."""

import collections

from mini_engine.interfaces import Row
from mini_engine.parts import NoWorkError
from mini_engine.text.detokenizer import Detokenizer


def step(engine):
    sched = engine.scheduler
    if engine.has_work is False:
        raise NoWorkError
    plan = sched.schedule()
    if len(plan) < 1:
        raise RuntimeError(f"waiting {len(sched.waiting)}, running {len(sched.running)}")
    rows = []
    for name in plan:
        request = engine.requests[name]
        rows.append(Row(request, plan[name], request.num_new_tokens <= plan[name]))
    done = tuple(r.request for r in rows if r.is_last)
    logits = engine.backend.forward(rows=rows)
    tokens, stops = engine.sample(logits=logits, requests=list(done))
    sched.update(scheduled=dict(plan), sampled=tokens, stopped=set(stops))
    return list(engine.collect(requests=list(done), stopped=stops))


class Stream:
    def __init__(self, engine, request):
        self.engine, self.request = engine, request
        self.inbox = engine.inboxes[request.request_id] = collections.deque()

    def __iter__(self):
        return self

    def __next__(self):
        if self.inbox is None:
            raise StopIteration
        while len(self.inbox) == 0:
            self.engine.step()
        delta = self.inbox.popleft()
        if delta.finish_reason is not None:
            self.unsubscribe()
            self.inbox = None
        return delta

    def close(self):
        if self.inbox is None:
            return
        self.unsubscribe()
        self.inbox = None
        if self.request.finish_reason is None:
            self.engine.abort(self.request.request_id)

    def unsubscribe(self):
        if self.engine.inboxes.get(self.request.request_id) is self.inbox:
            del self.engine.inboxes[self.request.request_id]


class OutputText:
    """Keeps only the end that is not given out."""

    def __init__(self, tokenizer, stop, prompt=()):
        self.detokenizer = Detokenizer(tokenizer, prompt) if tokenizer else None
        self.stop = stop
        self.held = ""

    def feed(self, token_id):
        return self.append(self.detokenizer.feed(token_id)) if self.detokenizer else None

    def flush(self):
        return self.append(self.detokenizer.flush()) if self.detokenizer else None

    def append(self, text):
        self.held = self.held + text
        places = {}
        for stop in self.stop:
            at = self.held.find(stop)
            if at != -1 and len(stop) < len(places.get(at, stop + "x")):
                places[at] = stop
        if not places:
            return None
        first = min(places)
        self.held = self.held[:first]
        return places[first]

    def take(self, finished):
        keep = 0
        if not finished:
            for n in range(len(self.held), 0, -1):
                tail = self.held[-n:]
                if any(s != tail and s.startswith(tail) for s in self.stop):
                    keep = n
                    break
        cut = len(self.held) - keep
        given, self.held = self.held[:cut], self.held[cut:]
        return given
