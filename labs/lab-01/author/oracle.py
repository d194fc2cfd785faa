"""lab-01's contract, written as one question asked again and again: what happens next?

Nothing is counted on the way. Each answer is worked out from the list of all that has happened in this
step, so that it is slow, and easy to hold against the docstring of `schedule_step`.
"""

from typing import NamedTuple

from mini_engine.request import RequestStatus


def least(num_new, budget, threshold):
    """The clamp that is used unless the caller gives another."""
    return max(0, sorted([num_new, budget, threshold or num_new])[0])


class Event(NamedTuple):
    """A request that has had its turn, and the tokens that it was given; None for one that is refused."""

    request: object
    tokens: int | None


def schedule_step(
    waiting, running, kv, *, max_num_batched_tokens, max_num_seqs, long_prefill_token_threshold=0, clamp=least
):
    at_first, history = tuple(running), []

    def left():
        return max_num_batched_tokens - sum(event.tokens or 0 for event in history)

    def share(request):
        return clamp(request.num_new_tokens, left(), long_prefill_token_threshold)

    while len(history) < len(at_first):
        request = at_first[len(history)]
        history.append(Event(request, share(request)))
        tokens = history[-1].tokens
        if tokens > 0 and kv.allocate(request, tokens) is not True:
            raise RuntimeError(f"{request.request_id} runs and has no room for {tokens} more")
    while may_admit(history, left(), len(waiting), len(running), max_num_seqs):
        history.append(admitted(waiting.peek(), waiting, running, kv, share))
    return {event.request.request_id: event.tokens for event in history if event.tokens}


def may_admit(history, left, num_waiting, num_running, max_num_seqs):
    """Whether there is a request to ask about, something to spend, a place, and no refusal so far."""
    refused = any(event.tokens is None for event in history)
    return not refused and num_waiting >= 1 and left >= 1 and num_running + 1 <= max_num_seqs


def admitted(request, waiting, running, kv, share):
    """The front of the queue has its turn."""
    if kv.admit(request) is not True:
        return Event(request, None)
    running[len(running) :] = [waiting.pop()]
    request.status = RequestStatus.RUNNING
    return Event(request, share(request))
