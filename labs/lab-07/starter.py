"""lab-07, engine: your file.

Replace each NotImplementedError by code; the docstrings say what to do, README.md says why.
Check with: LAB_IMPL=starter pytest labs/lab-07     Stuck? python -m labs hint lab-07
"""

from collections import deque
from collections.abc import Iterator

from mini_engine.text.detokenizer import Detokenizer


def step(engine):
    """One turn of the engine: serve what the scheduler chooses, and return a list of this step's Deltas.

    What the engine offers; each is called at most once in a step. In which order is for you to find.

    engine.has_work: is any request waiting or running?
    engine.requests: {request_id: Request}, all that are not finished.
    engine.scheduler.schedule(): decides the step: {request_id: num_tokens}, in row order. It admits,
        preempts and claims memory. The scheduler's `waiting` and `running` have a length.
    engine.backend.forward(rows): one pass of the model over a list of Row(request, num_tokens, is_last)
        (of mini_engine.interfaces). A row's tokens are those from the request's num_computed_tokens on;
        is_last says that they are all that it has left (num_new_tokens). Returns logits (S, vocab_size),
        a row for each of the S rows with is_last, in their order.
    engine.sample(logits, requests): chooses a token for each row of logits; `requests` are their owners.
        Returns two dicts: {request_id: [token_id]}, and of the requests whose text has now reached a
        stop string {request_id: that string}. It writes nothing into a Request.
    engine.scheduler.update(scheduled, sampled, stopped): takes the step back, from the schedule and the
        two dicts of sample: num_computed_tokens moves on, tokens are appended, finished requests get
        their finish_reason, leave, and free their blocks.
    engine.collect(requests, stopped): a list with the Delta of each of these requests: the newest of its
        outputs, and its finish_reason if that was the last. The engine forgets the finished.

    What must hold:

    - All that is scheduled goes through the model, in one pass, in the schedule's order.
    - A request gets a token, and a Delta, if this step computes all that it has left, and only then.
      A chunk that leaves something gives neither, and is progress all the same.
    - When step returns, all books are closed: every scheduled token is counted, the finished hold no
      block and are not in engine.requests. The Deltas stand in row order.
    - step itself changes no Request, and not the schedule.

    Raises NoWorkError (mini_engine.parts) when there is no work, and a RuntimeError that says how many
    requests are waiting and how many are running when there is work but nothing was scheduled: the model
    is not called then. An error of a part is not caught.
    """
    raise NotImplementedError("lab-07: step is not written yet")


class Stream(Iterator):
    """The Deltas of one request, in order, each as soon as it exists; the engine is driven by its readers.

    `engine.step()` puts each Delta into the inbox of its request's stream, whichever reader called it.
    """

    def __init__(self, engine, request):
        """Given: `request` has been added to `engine` and is not finished."""
        self.engine, self.request = engine, request
        self.inbox = engine.inboxes[request.request_id] = deque()
        self.closed = False

    def __next__(self):
        """The next Delta of this request.

        self.engine.step() is called while there is no Delta to give, and only then.
        The last Delta is the one with a finish_reason: the stream has been closed when it is returned.
        A closed stream raises StopIteration, however often it is asked, and takes no step.
        An error of the engine goes through to the reader. It does not end the stream: the next call
        tries again.
        """
        raise NotImplementedError("lab-07: Stream.__next__ is not written yet")

    def close(self):
        """Stop listening: nothing is computed for a reader that has left.

        Afterwards the stream is over, what lay unread in the inbox is dropped, the engine keeps no inbox
        for it (unsubscribe), and the request has been aborted (engine.abort takes its id) if it was not
        finished. Closing again does nothing. Closing the stream of a finished request aborts nothing:
        its id may be another request's by now.
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
        are several, the one that begins first in the text counts; of two that begin at the same place
        the shorter one, for it was complete first.
        """
        raise NotImplementedError("lab-07: OutputText.append is not written yet")

    def take(self, finished):
        """Return the text that may be given out now, and was not given out before.

        finished: everything. Otherwise the end of the text is held back while it might be the beginning
        of a stop string: the longest such end, and nothing when there is none.
        """
        raise NotImplementedError("lab-07: OutputText.take is not written yet")
