"""lab-10, speculative decoding: your file.

Replace each NotImplementedError by code; the docstrings say what to do, README.md says why.
Check with: LAB_IMPL=starter pytest labs/lab-10     Stuck? python -m labs hint lab-10
"""


class NgramProposer:
    """Proposes by prompt lookup: the tokens after an earlier place with the same last tokens."""

    def __init__(self, prompt_lookup_min=1, prompt_lookup_max=3, num_speculative_tokens=4):
        """Given: the lengths of the ends to look up, and how many tokens to propose."""
        self.prompt_lookup_min = prompt_lookup_min
        self.prompt_lookup_max = prompt_lookup_max
        self.num_speculative_tokens = num_speculative_tokens

    def propose(self, request):
        """Return a new list of tokens that may follow request.token_ids(), prompt and outputs together.

        Take the last n tokens of the text, its end, n = prompt_lookup_max first. Find the latest earlier
        place where the same n tokens stand (it may overlap the end, but is not the end itself). Propose
        what follows that place: at most num_speculative_tokens, fewer where the text is over. If the end
        stands nowhere else, try n - 1 tokens, and so on down to prompt_lookup_min. If nothing is found,
        return []. Changes nothing.
        """
        raise NotImplementedError("lab-10: NgramProposer.propose is not written yet")


class DraftModelProposer:
    """Proposes what a small model would say. That model has a cache of its own for each request."""

    def __init__(self, draft_model, num_speculative_tokens=4):
        """Given. draft_model.new_cache() is an empty cache, draft_model.forward(cache, token_ids) a pass."""
        self.draft_model = draft_model
        self.num_speculative_tokens = num_speculative_tokens
        self.caches = {}

    def propose(self, request):
        """Return a new list of num_speculative_tokens tokens: what the draft model says after the text.

        cache.token_ids lists the tokens whose keys and values the cache holds, from position 0 on. Some may
        be drafts of an earlier step that were rejected, and the text may have grown by any number of tokens
        since. cache.truncate(n) forgets all but the first n. forward(cache, token_ids) computes these
        tokens after those that the cache holds, at least one, and returns the token that comes next.

        Compute no token that the cache rightly holds, and none that is not needed: the last draft is returned
        but not computed. The last token of the text is computed even if the cache holds it, because its row
        says what comes next. The cache is kept for the next call, by request_id.
        """
        raise NotImplementedError("lab-10: DraftModelProposer.propose is not written yet")

    def forget(self, request):
        """Given: the request has left; so does its cache."""
        self.caches.pop(request.request_id, None)


def schedule_drafts(running, scheduled, kv, budget):
    """Give the drafts what a step has left. Called when every row has its tokens, newcomers included.

    scheduled: {request_id: number of tokens} of the step, which is changed. budget: its whole token budget.
    Go through `running` in order. A request that decodes (request.is_decode) and was scheduled may
    compute drafts after its last token, the first ones of request.spec_token_ids: as many as

    - the budget has left, when all rows and the drafts before it are paid;
    - max_tokens allows: the pass yields a token more than the drafts that are accepted, so of r tokens that
      it may still say, r - 1 can be drafts;
    - find room: kv.allocate(request, n) makes room for n tokens from num_computed_tokens on, or
      returns False and changes nothing. Drafts preempt no request: fewer of them may fit.

    The others are cut off request.spec_token_ids, and scheduled counts those that stay. Of any other
    running request (it computes its prompt, or recomputes, or has no row) all drafts are dropped.
    """
    raise NotImplementedError("lab-10: schedule_drafts is not written yet")


def verify(request, rows, sample):
    """Return the tokens that a pass over the last token and its drafts yields: 1 to len(rows).

    rows: 1 + k rows of the model's output for k drafts (request.spec_token_ids). Row 0 follows the last
    token, row i draft i - 1: each says what follows if all before it is right.
    sample(row, index) returns the token that the request would say from this row as its output number
    `index`, counted from 0: it is greedy, or draws with the random number that
    belongs to (seed, index). So ask for each row with its own index.

    A draft is kept if it is the token that was sampled in its place. The first that is not is replaced by
    the sampled token, and the rest is void. If all are kept, the last row yields one token more.
    Asks for no row that is void. Changes nothing.
    """
    raise NotImplementedError("lab-10: verify is not written yet")


def rewind(request, token_ids, kv):
    """Take a verified step into the request, and return how many of its drafts were accepted.

    token_ids: what `verify` returned; yours to read. The pass has computed the last token and all drafts, so
    the cache holds keys and values of drafts that are now void, and num_computed_tokens is as it was
    before the pass.

    1. Append token after token to output_token_ids. After each set finish_reason to request.check_stop();
       what follows a stop is dropped, as if it had never been sampled.
    2. num_computed_tokens: all tokens that are known now are computed, but the last, which was sampled.
    3. No draft is left in spec_token_ids.
    4. kv.cache_blocks(request) publishes the full blocks up to num_computed_tokens: only when that is right.
    5. kv.shrink(request) gives back the blocks after num_computed_tokens.

    Accepted are the drafts among the tokens that were appended: all but the last, which is the model's own.
    """
    raise NotImplementedError("lab-10: rewind is not written yet")


def residual(p, q):
    """Return what the target's distribution p has more than the draft's, q: a distribution again.

    Both are lists with a probability for each token. Where p is above q, the difference counts, elsewhere 0;
    the result is scaled so that it adds up to 1. If p and q are equal nothing is left over: return p's
    probabilities then (they are never drawn from). Changes nothing.
    """
    raise NotImplementedError("lab-10: residual is not written yet")


def rejection_sample(draft_token_ids, target, draft, chance):
    """Return the tokens that sampled drafts yield: 1 to k + 1 of them, distributed as the target's own.

    draft_token_ids: k drafts; draft i was drawn from the distribution draft[i], a list with a probability
    for each token. target: k + 1 rows, target[i] is the model's distribution in the place of draft i.
    chance.flip(a) returns True with probability a; chance.draw(row) returns a token, drawn from the row.

    With p and q the two probabilities of draft i: it is accepted with probability min(1, p / q). The first
    that is not accepted is replaced by a draw from the residual of its two rows, and the rest is void. If all
    are accepted, a token more is drawn from the last row of the target. Changes nothing.
    """
    raise NotImplementedError("lab-10: rejection_sample is not written yet")
