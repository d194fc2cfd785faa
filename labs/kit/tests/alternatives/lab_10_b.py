"""Another right lab-10: recursion in place of loops, and a draw where the reference flips."""


class NgramProposer:
    def __init__(self, prompt_lookup_min=1, prompt_lookup_max=3, num_speculative_tokens=4):
        self.prompt_lookup_min = prompt_lookup_min
        self.prompt_lookup_max = prompt_lookup_max
        self.num_speculative_tokens = num_speculative_tokens

    def propose(self, request):
        return self.look(request.token_ids(), self.prompt_lookup_max)

    def look(self, text, n):
        if n < self.prompt_lookup_min:
            return []
        for place in reversed(range(n, len(text))):
            if text[place - n : place] == text[len(text) - n :]:
                return text[place:][: self.num_speculative_tokens]
        return self.look(text, n - 1)


class DraftModelProposer:
    def __init__(self, draft_model, num_speculative_tokens=4):
        self.draft_model = draft_model
        self.num_speculative_tokens = num_speculative_tokens
        self.caches = {}

    def propose(self, request):
        cache = self.caches.get(request.request_id) or self.draft_model.new_cache()
        self.caches[request.request_id] = cache
        text = request.token_ids()
        differs = [i for i, (a, b) in enumerate(zip(cache.token_ids, text, strict=False)) if a != b]
        keep = min([*differs, len(cache.token_ids), len(text) - 1])
        cache.truncate(keep)
        return self.say(cache, text[keep:], self.num_speculative_tokens)

    def say(self, cache, new, more):
        if not more:
            return []
        token = self.draft_model.forward(cache, new)
        return [token, *self.say(cache, [token], more - 1)]

    def forget(self, request):
        self.caches = {name: cache for name, cache in self.caches.items() if name != request.request_id}


def schedule_drafts(running, scheduled, kv, budget):
    for request in running:
        most = min(
            len(request.spec_token_ids),
            budget - sum(scheduled.values()),
            request.max_tokens - len(request.output_token_ids) - 1,
        )
        if not request.is_decode or request.request_id not in scheduled:
            most = 0
        fits = next((n for n in range(most, 0, -1) if kv.allocate(request, 1 + n)), 0)
        request.spec_token_ids = list(request.spec_token_ids[:fits])
        if fits:
            scheduled[request.request_id] = 1 + fits


def verify(request, rows, sample, done=()):
    token_id = sample(rows[0], len(request.output_token_ids) + len(done))
    done = [*done, token_id]
    right = request.spec_token_ids[: len(done)] == done
    return verify(request, rows[1:], sample, done) if right and len(rows) > 1 else done


def rewind(request, token_ids, kv):
    first, *rest = token_ids
    request.output_token_ids.append(first)
    request.finish_reason = request.check_stop()
    if rest and not request.finish_reason:
        return 1 + rewind(request, rest, kv)
    request.spec_token_ids = []
    request.num_computed_tokens = len(request.token_ids()) - 1
    kv.cache_blocks(request)
    kv.shrink(request)
    return 0


def residual(p, q):
    if list(p) == list(q):
        return list(p)
    gaps = [a - b if a > b else 0 for a, b in zip(p, q, strict=True)]
    return [gap / sum(gaps) for gap in gaps]


def rejection_sample(draft_token_ids, target, draft, chance):
    if not draft_token_ids:
        return [chance.draw(target[0])]
    token_id, p, q = draft_token_ids[0], target[0], draft[0]
    accept = min(1, p[token_id] / q[token_id])
    if chance.draw([accept, 1 - accept]):
        return [chance.draw(residual(p, q))]
    return [token_id, *rejection_sample(draft_token_ids[1:], target[1:], draft[1:], chance)]
