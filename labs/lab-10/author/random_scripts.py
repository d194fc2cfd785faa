"""lab-10's scripts: texts that repeat themselves, a draft model's cache, steps with drafts, and chance.

`only` in a script's config says what it is about.
"""

from labs.kit import Skip
from labs.kit.toys import speculation as toys
from labs.kit.toys.driver import ids
from labs.kit.toys.plays import Play as Base
from labs.kit.toys.plays import plain

SCRIPTS = 160


def draw(rng):
    kinds = (draw_texts, draw_drafts, draw_steps, draw_verify, draw_chance)
    return rng.choices(kinds, (30, 25, 60, 15, 30))[0](rng)


def draw_texts(rng):
    """Texts over few tokens, with ends of several lengths to look up."""
    least = rng.choice((1, 1, 2, 3))
    most, k = least + rng.choice((0, 1, 2, 3)), rng.choice((1, 2, 4, 8))
    config = {"only": "ngram", "min": least, "max": most, "k": k}
    tokens, calls = rng.choice(([0, 1], [0, 1, 2, 3], [5, 5 + 2**16, 2**40])), []
    for name in "ab"[: rng.randint(1, 2)]:
        calls.append(["add", name, [rng.choice(tokens) for _ in range(rng.choice((1, 2, 4, 9, 16)))], 99])
    for _ in range(rng.randint(2, 8)):
        name = rng.choice("ab")
        calls.append(["propose", name])
        calls.append(["grow", name, 0, [rng.choice(tokens) for _ in range(rng.randint(1, 4))]])
    return {"config": config, "calls": [*calls, ["propose", "a"], ["propose", "a"]]}


def draw_drafts(rng):
    """Drafts of which some are accepted, by one or several requests in turn."""
    calls = [["add", name, [rng.randrange(3) for _ in range(rng.randint(1, 6))], 99] for name in "ab"]
    for _ in range(rng.randint(3, 9)):
        name = rng.choice("aab")
        kept = rng.choice((0, 1, 2, 3, 9, -1, -2))
        new = [rng.randrange(3) for _ in range(rng.choice((0, 1, 1, 1, 3)))]
        calls += [["propose", name], ["grow", name, kept, new]]
    return {"config": {"only": "draft", "k": rng.choice((0, 1, 2, 3, 5))}, "calls": calls}


def draw_steps(rng):
    """Requests in a pool that is small or just large enough, and steps with drafts, right ones and wrong."""
    size, crowd = rng.choice((1, 2, 2, 3, 4)), rng.randint(1, 4)
    lengths = [(rng.randint(1, 7), rng.choice((1, 2, 3, 6, 10))) for _ in range(crowd + 1)]
    largest = max(-(-(prompt + most) // size) for prompt, most in lengths)
    total = sum(-(-(prompt + most) // size) for prompt, most in lengths)
    config = {
        "only": "steps",
        "num_blocks": rng.choice((largest + 1, largest + 2, (largest + total) // 2, total)),
        "block_size": size,
        "max_num_batched_tokens": rng.choice((crowd, crowd + 1, crowd + 3, 12, 40)),
        "max_num_seqs": crowd,
        "prefix_caching": rng.random() < 0.7,
    }
    calls, head = [], [rng.randrange(3) for _ in range(7)]
    for name, (prompt, most) in zip("abcde", lengths, strict=False):
        seeded = {"temperature": 1.0, "seed": rng.randrange(9)}
        more = rng.choice(({}, seeded, {"stop_token_ids": [rng.randrange(9)]}))
        calls.append(["add", name, head[: prompt - 1] + [rng.randrange(4)], most, more])
    for _ in range(rng.randint(4, 10)):
        names = "abcde"[: crowd + 1]
        calls.append(["step", {n: [rng.choice((0, 1, 2, 3, 9)), rng.choice((0, 0, 1, 3))] for n in names}])
        if rng.random() < 0.1:
            calls.append(["preempt", rng.choice("abc")])
    return {"config": config, "calls": calls}


def draw_verify(rng):
    """Drafts beside what is said in their places: a token may be right again behind one that is wrong."""
    calls = [["add", "a", [1, 2], 99]]
    for _ in range(rng.randint(1, 4)):
        drafts = [rng.randrange(3) for _ in range(rng.choice((0, 1, 3, 5)))]
        said = [token if rng.random() < 0.75 else rng.randrange(3) for token in drafts] + [rng.randrange(3)]
        calls += [["verify", "a", drafts, said], ["grow", "a", 0, [5] * rng.randint(0, 2)]]
    return {"config": {"only": "verify"}, "calls": calls}


def draw_chance(rng):
    """Distributions with equal, empty and opposite places; and drafts that the draft model may draw."""

    def row(size):
        weights = [rng.choice((0, 0, 1, 1, 2, 5)) for _ in range(size)]
        return weights if any(weights) else [1] * size

    size, calls = rng.choice((2, 3, 4)), []
    for _ in range(3):
        p, q = row(size), row(size)
        calls.append(["residual", p, rng.choice((q, q, p))])
        k = rng.choice((0, 1, 1, 2, 3))
        draft = [row(size) for _ in range(k)]
        target = [rng.choice((row(size), row(size), one)) for one in [*draft, row(size)]]
        tokens = [rng.choice([t for t, weight in enumerate(one) if weight]) for one in draft]
        calls.append(["rejection_sample", tokens, target, draft])
    return {"config": {"only": "chance"}, "calls": calls}


class Play(Base):
    """The functions of a part, on requests by name; of a loop also its pool."""

    def __init__(self, part, config):
        super().__init__(part)
        self.only, self.loop, self.asked, self.drafts = config["only"], None, [], {}
        self.toy = toys.ToyDraft()
        if self.only == "ngram":
            self.proposer = part.NgramProposer(config["min"], config["max"], config["k"])
        elif self.only == "draft":
            self.proposer = part.DraftModelProposer(self.toy, config["k"])
        elif self.only == "steps":
            self.loop = toys.spec_loop(part, config)
            self.loop.lab, self.loop.proposer = self, self

    def add(self, name, prompt, max_tokens, more=()):
        entry = {"id": name, "prompt": prompt, "max_tokens": max_tokens}
        self.requests[name] = request = toys.request_of(entry | dict(more))
        request.prompt_token_ids = list(prompt)
        if self.loop:
            self.loop.add(request)

    def propose(self, name):
        """Return what a part proposes; in a step, what the script says."""
        if not isinstance(name, str):
            return self.scripted(name)
        request = self.known(name)
        with self.only_reading(request=request):
            drafts = self.proposer.propose(request)
        self.drafts[name] = list(drafts)
        self.lend(f"drafts of {name}", drafts)
        return list(drafts)

    def grow(self, name, kept, tokens):
        """So many of the drafts are accepted, -1 of them all but the last; then come these tokens.

        With -2 another token came in place of the first draft, and then by chance the tokens of the others.
        """
        drafts = self.drafts.pop(name, [])
        came = [token + 1 for token in drafts[:1]] + drafts[1:] if kept == -2 else drafts[:kept]
        self.known(name).output_token_ids += came + tokens

    def step(self, drafts):
        if not self.loop.has_work:
            raise Skip
        self.planned, self.asked = drafts, []
        for request in self.loop.running:
            request.spec_token_ids = [11]  # none but a decode may keep them
        scheduled = self.loop.schedule()
        kept = {r.request_id: list(r.spec_token_ids) for r in self.loop.running}
        sampled = self.loop.compute(scheduled)
        said = plain(sampled)
        self.loop.update(scheduled, sampled)
        return {"scheduled": plain(scheduled), "drafts": kept, "sampled": said}

    def preempt(self, name):
        request = self.known(name)
        if request not in self.loop.running:
            raise Skip
        self.loop.preempt(request)

    def scripted(self, request):
        """The tokens that the request will say, as many as the script has them right, and then others."""
        right, wrong = self.planned.get(request.request_id, (0, 0))
        return toys.text_alone(request)[len(request.output_token_ids) :][:right] + [11] * wrong

    def schedule_drafts(self, running, scheduled, kv, budget):
        given = [(r, r.spec_token_ids, list(r.spec_token_ids)) for r in running]
        self.part.schedule_drafts(running, scheduled, kv, budget)
        for r, drafts, before in given:
            if drafts not in (before, before[: len(r.spec_token_ids)]):
                self.changed.append(f"the drafts of {r.request_id}")

    def verify(self, request, rows, sample):
        """Verify a request. If it is given by name, `rows` are its drafts and `sample` the model's tokens."""
        if isinstance(request, str):
            request = self.known(request)
            request.spec_token_ids, self.asked = list(rows), []
            rows = [[i] for i in range(len(sample))]

        def ask(row, index):
            place = next(i for i, one in enumerate(rows) if one is row)
            self.asked.append([request.request_id, place, index])
            return sample(row, index) if callable(sample) else sample[place]

        with self.only_reading(request=request, rows=rows):
            return list(self.part.verify(request, rows, ask))

    def rewind(self, request, token_ids, kv):
        with self.only_reading(token_ids=token_ids):
            return self.part.rewind(request, token_ids, kv)

    def residual(self, p, q):
        p, q = toys.exact_row(p), toys.exact_row(q)
        with self.only_reading(p=p, q=q):
            return [str(toys.exact(one)) for one in self.part.residual(p, q)]

    def rejection_sample(self, drafts, target, draft):
        """Return all that may come of it, with exact probabilities."""
        target, draft = [[toys.exact_row(row) for row in rows] for rows in (target, draft)]
        given = {"drafts": drafts, "target": target, "draft": draft}

        def once(chance):
            with self.only_reading(**given):
                return self.part.rejection_sample(drafts, target, draft, chance)

        found = toys.distribution(once)
        return {" ".join(map(str, outcome)): str(weight) for outcome, weight in sorted(found.items())}

    def seen(self):
        seen = {"changed": self.all_changed()}
        if self.only in ("draft", "verify", "steps"):
            seen["rows asked for (id, row, output index)"] = self.asked
            seen["tokens the draft model computed"] = sum(self.toy.passes, [])
            self.toy.passes, self.asked = [], []
        if self.loop:
            kv = self.loop.kv
            seen |= {"running": ids(self.loop.running), "num_free_blocks": kv.num_free_blocks}
            seen |= {"num_cached_blocks": kv.num_cached_blocks, "accepted drafts": self.loop.accepted}
            seen["lengths"] = {r.request_id: len(kv.block_table(r)) for r in self.loop.running}
            for name, request in self.requests.items():
                fields = ("num_computed_tokens", "output_token_ids", "spec_token_ids", "finish_reason")
                seen |= {f"{field} of {name}": plain(getattr(request, field)) for field in fields}
                if request.output_token_ids != toys.text_alone(request)[: len(request.output_token_ids)]:
                    seen[f"text of {name}"] = "not that of a run alone"
        return seen
