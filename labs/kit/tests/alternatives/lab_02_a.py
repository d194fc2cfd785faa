"""Another right lab-02: arithmetic with infinity, and a chunk with properties that looks its tokens up."""

from array import array


def clamp(num_new, budget, threshold):
    return max(0, sorted([num_new, budget, threshold or float("inf")])[0])


class Chunk:
    def __init__(self, request, size):
        self.start, self.size = request.num_computed_tokens, size
        self.tokens = array("q", request.prompt_token_ids + request.output_token_ids)
        self.left = request.num_new_tokens

    @property
    def token_ids(self):
        return self.tokens[self.start :][: self.size].tolist()

    @property
    def positions(self):
        return range(self.start, self.start + self.size)

    @property
    def is_last(self):
        return self.size == self.left

    def __iter__(self):
        return iter((self.token_ids, self.positions, self.is_last))


def next_chunk(request, num_tokens):
    return Chunk(request, num_tokens)


def prefill_budget(running, budget):
    by_id = {request.request_id: request for request in running}
    decodes = {request for request in by_id.values() if request.is_decode}
    return budget - len(decodes)
