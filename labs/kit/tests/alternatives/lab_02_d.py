"""Another right lab-02: the chunk is a class with properties that looks its tokens up when it is made."""

from array import array


def clamp(num_new, budget, threshold):
    for limit in (budget, threshold or num_new):
        num_new -= max(num_new - limit, 0)
    return num_new if num_new > 0 else 0


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
    prompts = [request for request in running if not request.is_decode]
    return budget - (len(running) - len(prompts))
