"""lab-10's contract once more, slow and plain: all cases are listed, and the right one is picked.

The random scripts compare a part with it after each call.
"""


class NgramProposer:
    """All places at which an end of the text stands before; the best of them."""

    def __init__(self, shortest, longest, most):
        self.shortest, self.longest, self.most = shortest, longest, most

    def propose(self, request):
        text = [*request.prompt_token_ids, *request.output_token_ids]
        found = []
        for place in range(1, len(text)):  # what follows begins here
            for n in range(self.shortest, min(self.longest, place) + 1):
                if all(text[place - i] == text[len(text) - i] for i in range(1, n + 1)):
                    found.append((n, place))
        return [token for i, token in enumerate(text) if found and 0 <= i - max(found)[1] < self.most]


class DraftModelProposer:
    """Remembers the whole text of each cache, and finds out position by position what of it still holds."""

    def __init__(self, draft_model, most):
        self.draft_model, self.most, self.known = draft_model, most, {}

    def propose(self, request):
        text = [*request.prompt_token_ids, *request.output_token_ids]
        if request.request_id not in self.known:
            self.known[request.request_id] = self.draft_model.new_cache()
        cache = self.known[request.request_id]
        right = [n for n in range(len(text)) if cache.token_ids[:n] == text[:n]]
        cache.truncate(max(right))
        said, queue = [], text[max(right) :]
        for _ in range(self.most):
            said += [self.draft_model.forward(cache, queue)]
            queue = said[-1:]
        return said


def schedule_drafts(running, scheduled, kv, budget):
    """One draft after the other, as long as nothing forbids the next."""
    for request in running:
        wanted, given = list(request.spec_token_ids), []
        decodes = request.num_computed_tokens == request.num_tokens - 1 and request.output_token_ids
        while decodes and request.request_id in scheduled and len(given) < len(wanted):
            spent = sum(scheduled.values())
            yields = len(request.output_token_ids) + len(given) + 2
            if spent >= budget or yields > request.max_tokens or not kv.allocate(request, 2 + len(given)):
                break
            given.append(wanted[len(given)])
            scheduled[request.request_id] += 1
        request.spec_token_ids = given


def verify(request, rows, sample):
    """The next row is asked for as long as all that was said are the drafts."""
    said, drafts = [], list(request.spec_token_ids)
    while said == drafts[: len(said)] and len(said) < len(rows):
        said.append(sample(rows[len(said)], len(request.output_token_ids) + len(said)))
    return said


def rewind(request, token_ids, kv):
    """All lengths at which the request may end are tried, the shortest first."""
    outputs, rest = list(request.output_token_ids), list(token_ids)
    for num in range(1, len(rest) + 1):
        request.output_token_ids[:] = outputs + rest[:num]
        request.finish_reason = request.check_stop()
        if request.finish_reason is not None or num == len(rest):
            break
    request.spec_token_ids = []
    request.num_computed_tokens = len(request.prompt_token_ids) + len(outputs) + num - 1
    kv.cache_blocks(request)
    kv.shrink(request)
    return num - 1


def residual(p, q):
    rest = {token: p[token] - q[token] for token in range(len(p)) if p[token] > q[token]}
    if not rest:
        return list(p)
    return [rest.get(token, 0) / sum(rest.values()) for token in range(len(p))]


def rejection_sample(draft_token_ids, target, draft, chance):
    """List all outcomes with their probabilities, and draw one of them."""
    outcomes, reached = [], 1
    for i, token in enumerate(draft_token_ids):
        accepted = min(1, target[i][token] / draft[i][token])
        for other, part in enumerate(residual(target[i], draft[i])):
            outcomes.append(([*draft_token_ids[:i], other], reached * (1 - accepted) * part))
        reached *= accepted
    for other, part in enumerate(target[-1]):
        outcomes.append(([*draft_token_ids, other], reached * part))
    return outcomes[chance.draw([part for _, part in outcomes])][0]
