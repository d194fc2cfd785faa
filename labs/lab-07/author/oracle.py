"""lab-07's contract once more, slow and plain, worked out anew from what has happened.

The random scripts compare a part with it after each call.
"""

from collections.abc import Iterator

from mini_engine.interfaces import Row
from mini_engine.parts import NoWorkError
from mini_engine.text.detokenizer import Detokenizer


def step(engine):
    """One turn, from the token ids themselves: what is known of a request, and what is computed after it."""
    scheduler = engine.scheduler
    if len(scheduler.waiting) + len(scheduler.running) == 0:
        raise NoWorkError("there is no request")
    plan = scheduler.schedule()
    if plan == {}:
        there = f"{len(scheduler.waiting)} waiting, {len(scheduler.running)} running"
        raise RuntimeError(f"empty schedule, {there}")
    rows = []
    for name, amount in plan.items():
        request = engine.requests[name]
        unknown_yet = request.token_ids()[request.num_computed_tokens + amount :]
        rows.append(Row(request, amount, unknown_yet == []))
    logits = engine.backend.forward(rows)
    speakers = [row[0] for row in rows if row[2]]
    tokens, stops = engine.sample(logits, speakers)
    scheduler.update(dict(plan), tokens, stops)
    return engine.collect(speakers, stops)


class Stream(Iterator):
    """All that ever came for the request is kept; a place in it says what has been read."""

    def __init__(self, engine, request):
        self.engine, self.request = engine, request
        self.history, self.place, self.left = [], 0, False
        self.mailbox = engine.inboxes[request.request_id] = self.history

    def over(self):
        return self.left or any(delta.finish_reason for delta in self.history[: self.place])

    def __next__(self):
        if self.over():
            raise StopIteration
        while len(self.history) == self.place:
            self.engine.step()
        self.place += 1
        if self.over():
            self.unsubscribe()
        return self.history[self.place - 1]

    def close(self):
        self.left = True
        self.unsubscribe()
        if any(mine is self.request for mine in self.engine.requests.values()):
            self.engine.abort(self.request.request_id)

    def unsubscribe(self):
        for name, mailbox in list(self.engine.inboxes.items()):
            if mailbox is self.history:
                del self.engine.inboxes[name]


class OutputText:
    """The pieces are kept; the text, its end and what may be shown are read off them place by place."""

    def __init__(self, tokenizer, stop, prompt=()):
        self.detokenizer = Detokenizer(tokenizer, prompt) if tokenizer else None
        self.stops = sorted(stop, key=len)
        self.pieces, self.shown = [], ""

    def feed(self, token_id):
        return self.append(self.detokenizer.feed(token_id)) if self.detokenizer else None

    def flush(self):
        return self.append(self.detokenizer.flush()) if self.detokenizer else None

    def ending(self):
        """Where the text ends, and by which stop string."""
        whole = "".join(self.pieces)
        for place in range(len(whole)):
            for stop in self.stops:  # the shorter first
                if whole[place : place + len(stop)] == stop:
                    return place, stop
        return len(whole), None

    def append(self, text):
        self.pieces.append(text)
        return self.ending()[1]

    def take(self, finished):
        """From left to right: a character may be shown if no stop string can begin at it."""
        end, _ = self.ending()
        text = "".join(self.pieces)[:end]
        visible = text
        if not finished:
            for place in range(len(text)):
                rest = text[place:]
                if any(len(rest) < len(stop) and stop[: len(rest)] == rest for stop in self.stops):
                    visible = text[:place]
                    break
        new = visible[len(self.shown) :]
        self.shown += new
        return new
