"""Another right lab-10: an index for the lookup, positions counted, and drafts given one by one."""

from fractions import Fraction


class NgramProposer:
    def __init__(self, prompt_lookup_min=1, prompt_lookup_max=3, num_speculative_tokens=4):
        self.prompt_lookup_min = prompt_lookup_min
        self.prompt_lookup_max = prompt_lookup_max
        self.num_speculative_tokens = num_speculative_tokens

    def propose(self, request):
        text = tuple(request.prompt_token_ids) + tuple(request.output_token_ids)
        ends = {text[i : i + n]: i + n for i in range(len(text)) for n in self.sizes() if i + n < len(text)}
        for n in reversed(self.sizes()):
            place = ends.get(text[max(len(text) - n, 0) :]) if n <= len(text) else None
            if place:
                return list(text[place:][: self.num_speculative_tokens])
        return []

    def sizes(self):
        return range(self.prompt_lookup_min, self.prompt_lookup_max + 1)


class DraftModelProposer:
    def __init__(self, draft_model, num_speculative_tokens=4):
        self.draft_model = draft_model
        self.num_speculative_tokens = num_speculative_tokens
        self.caches = {}

    def propose(self, request):
        if self.num_speculative_tokens == 0:
            return []
        if request.request_id not in self.caches:
            self.caches[request.request_id] = self.draft_model.new_cache()
        cache, text = self.caches[request.request_id], request.token_ids()
        same = min(len(cache.token_ids), len(text) - 1)
        while list(cache.token_ids[:same]) != text[:same]:
            same -= 1
        cache.truncate(same)
        for token in text[same:-1]:  # one by one: the same tokens, in more passes
            self.draft_model.forward(cache, [token])
        drafts = [self.draft_model.forward(cache, text[-1:])]
        while len(drafts) < self.num_speculative_tokens:
            drafts += [self.draft_model.forward(cache, [drafts[-1]])]
        return drafts

    def forget(self, request):
        del self.caches[request.request_id]


def schedule_drafts(running, scheduled, kv, budget):
    for request in running:
        drafts, request.spec_token_ids = request.spec_token_ids, []
        if not (request.is_decode and request.request_id in scheduled):
            continue
        for draft in drafts:
            num = len(request.spec_token_ids)
            if sum(scheduled.values()) == budget:
                break
            if len(request.output_token_ids) + num + 2 > request.max_tokens:
                break
            if not kv.allocate(request, num + 2):
                break
            request.spec_token_ids = [*request.spec_token_ids, draft]
            scheduled[request.request_id] += 1


def verify(request, rows, sample):
    index, answer = len(request.output_token_ids), []
    for draft, row in zip([*request.spec_token_ids, None], rows, strict=True):
        answer.append(sample(row, index + len(answer)))
        if answer[-1] != draft:
            return answer
    return answer


def rewind(request, token_ids, kv):
    accepted = -1
    for token_id in token_ids:
        accepted += 1
        request.output_token_ids += [token_id]
        if reason := request.check_stop():
            request.finish_reason = reason
            break
    else:
        request.finish_reason = None
    request.num_computed_tokens = request.num_tokens - 1
    request.spec_token_ids = []
    kv.cache_blocks(request)
    kv.shrink(request)
    return accepted


def residual(p, q):
    shared = sum(min(a, b) for a, b in zip(p, q, strict=True))
    if shared == 1:
        return p[:]
    return [(a - min(a, b)) / (1 - shared) for a, b in zip(p, q, strict=True)]


def rejection_sample(draft_token_ids, target, draft, chance):
    num = 0
    for token_id in draft_token_ids:
        ratio = Fraction(target[num][token_id]) / Fraction(draft[num][token_id])
        if ratio < 1 and not chance.flip(ratio):
            break
        num += 1
    row = residual(target[num], draft[num]) if num < len(draft_token_ids) else target[num]
    return list(draft_token_ids[:num]) + [chance.draw(row)]
