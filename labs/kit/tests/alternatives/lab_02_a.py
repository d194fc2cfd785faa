"""Another right lab-02: sorting instead of comparing, and token by token."""

from types import SimpleNamespace


def clamp(num_new, budget, threshold):
    limits = [num_new, budget]
    if threshold:
        limits.append(threshold)
    smallest = sorted(limits)[0]
    return smallest if smallest > 0 else 0


def next_chunk(request, num_tokens):
    everything = [*request.prompt_token_ids, *request.output_token_ids]
    places = [request.num_computed_tokens + i for i in range(num_tokens)]
    return Chunk([everything[place] for place in places], places, places[-1] == len(everything) - 1)


class Chunk(SimpleNamespace):
    def __init__(self, token_ids, positions, is_last):
        super().__init__(token_ids=token_ids, positions=positions, is_last=is_last)

    def __iter__(self):
        return iter((self.token_ids, self.positions, self.is_last))


def prefill_budget(running, budget):
    for request in running:
        if request.output_token_ids and request.num_computed_tokens + 1 == request.num_tokens:
            budget -= 1
    return budget
