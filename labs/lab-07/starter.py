"""lab-07, engine: your file.

Replace each NotImplementedError by code; the docstrings say what to do, README.md says why.
Check with: LAB_IMPL=starter pytest labs/lab-07     Stuck? python -m labs hint lab-07
"""

from collections import deque
from collections.abc import Iterator

from mini_engine.text.detokenizer import Detokenizer


def step(engine):
    """One turn of the engine: decide, compute, choose, take back, hand out. The Deltas of this step.

    What the engine gives you: engine.has_work, engine.requests (by id), engine.scheduler,
    engine.backend, engine.sample, engine.collect.

    1. With no work, raise NoWorkError (of mini_engine.parts): the caller would otherwise call for ever.
    2. scheduled = engine.scheduler.schedule(), once: {request_id: num_tokens}, in row order.
    3. rows = a list of Row(request, num_tokens, is_last), in that order (of mini_engine.interfaces).
       is_last: num_tokens is all that the request has left (num_new_tokens). Look now: step 6 changes
       the counters. If the list is empty although there is work, raise a RuntimeError that says how
       many requests are waiting and how many are running.
    4. ending = the requests of the rows with is_last, in row order. Only these get a token; a partial
       chunk gives none.
    5. logits = engine.backend.forward(rows), once, for all rows; it returns a row for each of the
       ending. sampled, stopped = engine.sample(logits, ending): {request_id: [token_id]}, and of the
       requests whose text has reached a stop string {request_id: that string}.
    6. engine.scheduler.update(scheduled, sampled, stopped): all rows advance, the sampled tokens are
       appended, and the finished leave, so that their blocks are free for the very next step.
    7. Return engine.collect(ending, stopped): what each has just said, and whether it was the last.
    """
    raise NotImplementedError("lab-07: step is not written yet")


class Stream(Iterator):
    """The Deltas of one request, in order, each when it is there; the engine is driven by whoever reads.

    `engine.step()` puts every Delta of this request into the stream's inbox, whoever called it.
    """

    def __init__(self, engine, request):
        """Given: `request` has been added to `engine` and is not finished."""
        self.engine, self.request = engine, request
        self.inbox = engine.inboxes[request.request_id] = deque()
        self.closed = False

    def __next__(self):
        """The next Delta of this request.

        1. A closed stream is over: raise StopIteration.
        2. While the inbox is empty, self.engine.step(). That serves everybody, and the others' Deltas
           go to their own inboxes.
        3. Take the oldest Delta from the inbox. If it has a finish_reason it is the last: close().
        4. Return it.
        """
        raise NotImplementedError("lab-07: Stream.__next__ is not written yet")

    def close(self):
        """Stop listening; a reader who goes away must not be computed for.

        1. The stream is closed.
        2. unsubscribe().
        3. If the request is not finished (finish_reason is None), engine.abort its id.
        Closing twice, or a stream that is at its end, does nothing: the id may be somebody else's by now.
        """
        raise NotImplementedError("lab-07: Stream.close is not written yet")

    def unsubscribe(self):
        """Given: no more Deltas into this inbox."""
        inboxes, request_id = self.engine.inboxes, self.request.request_id
        if inboxes.get(request_id) is self.inbox:
            del inboxes[request_id]


class OutputText:
    """The text of one request as it grows, given out without ever showing a part of a stop string.

    `text` is all that was decoded, up to a stop string if there was one; `num_given` characters of it
    have been given out.
    """

    def __init__(self, tokenizer, stop, prompt=()):
        """Given. stop: a tuple of strings that end the text. prompt: the token ids before it."""
        self.detokenizer = Detokenizer(tokenizer, prompt) if tokenizer else None
        self.stop = stop
        self.text = ""
        self.num_given = 0

    def feed(self, token_id):
        """Given: take a token; the stop string that the text has now reached, or None."""
        return self.append(self.detokenizer.feed(token_id)) if self.detokenizer else None

    def flush(self):
        """Given: decode what waited for the rest of a character."""
        return self.append(self.detokenizer.flush()) if self.detokenizer else None

    def append(self, text):
        """Put new text behind the old. If a stop string is there now, cut the text before it.

        Returns the stop string, or None. It may have begun in an earlier piece of text. When there
        are several, the one that begins first in the text counts.
        """
        raise NotImplementedError("lab-07: OutputText.append is not written yet")

    def take(self, finished):
        """What may be given out now, and was not given out before.

        finished: everything. Otherwise hold back the end of the text for as long as it might be the
        beginning of a stop string: the longest such end, and nothing when there is none.
        """
        raise NotImplementedError("lab-07: OutputText.take is not written yet")
