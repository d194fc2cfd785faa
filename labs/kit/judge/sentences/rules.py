"""A sentence, the rule that it comes from, and the hint of that rule."""

from dataclasses import dataclass

HINTS = {
    "budget": "Before each request, work out what is left of the step's budget; none gets more than that.",
    "threshold": "The threshold limits one request's chunk, whatever is left of the budget.",
    "chunk": "A chunk is all that is left of the request, unless a limit is smaller.",
    "row": "Ask of each running request: is something left of it to compute, and is budget left?",
    "row order": "The rows stand in the order in which requests are served: running ones first.",
    "admission": "A request is admitted when budget, a slot and memory (the reserve included) are there.",
    "admission order": "Only the front of the queue may be admitted; no request overtakes it.",
    "cached": "What the prefix cache holds of a request counts as computed from its admission on.",
    "preemption": "Preempt only when a running request finds no room, and only as many as it takes.",
    "victim": "Look up how the policy chooses the victim.",
    "queued": "A request keeps its arrival and its priority as long as it lives, through preemptions too.",
    "memory": "Follow the blocks: who takes them, how many, and when they are given back.",
    "queue": "Follow the request: it is in waiting or in running, and its place there counts.",
    "count": "Compare the lists of waiting and running requests after the step.",
    "tokens": "A token is sampled where a chunk ends its sequence; it depends on all that came before.",
    "finish": "Look at when a request ends: at its last token, by max_tokens, a stop token, or an abort.",
    "end": "Read the error's line, and the state that the run was in just before it.",
    "raised": "Compare the call with what the docstring says it refuses, and what it must not refuse.",
    "refusal": "Work out by hand what the call needs and what is free, the reserve included.",
    "counter": "The counter is changed in one place only; look for the call that changes it, or forgets to.",
    "changed": "A function that only reads leaves its arguments, and what it returned before, as they are.",
    "returned": "Work the call out by hand on these arguments, and compare.",
    "tensor": "Take the smallest case that shows it, and print both tensors beside each other.",
    "calls": "Compare the order of the calls with the order in which the docstring names them.",
    "limit": "On paper, best token first: which ones does the setting keep, and which is the last?",
    "logit": "Follow the one token: which rule changes its logit, how often, and in which order?",
    "probability": "Go through the settings in order: what has each of them left of the row?",
    "drawn": "Draw the line from 0 to 1 with the stretches of the tokens, and put the number on it.",
    "numbers": "A number depends on seed and index. What else does yours depend on?",
    "mask": "Walk the token byte by byte: may each follow, and can an end still be reached behind it?",
    "proposal": "Write the text on paper, mark its end, and look for the same tokens before it.",
    "draft cache": "Compare what the cache holds with the text, from the front, and compute the rest.",
    "drafts": "Work out three limits: what the budget has left, what max_tokens allows, what finds room.",
    "verify": "Go through the rows in order; each is an output of its own, and a wrong draft ends it.",
    "accepted": "Count the outputs that were appended; the last one is the model's own.",
    "chance": "Follow one draft: how often is it there, how often accepted, and what comes in its place?",
    "thread": "Which lines does the event loop run, which the engine's thread? How do they reach each other?",
    "client": "Follow this one client: what must happen so that it goes on, which line does that, and when?",
    "computed": "Follow the request: which command takes it out of the engine, and is it always sent?",
    "place": "num_requests goes up in one place and down in one place; look for a way past one of them.",
    "text": "Join the pieces of the text, and look at where a stop string begins and ends.",
}


Clauses = tuple[str, str, str]  # the rule, and what the learner's and the reference's records say


@dataclass(frozen=True)
class Sentence:
    """A true sentence in two clauses, and the rule that wrote it; "field", the plainest, has no hint."""

    rule: str
    yours: str
    reference: str

    @property
    def text(self) -> str:
        return f"{self.yours}; {self.reference}."

    @property
    def hint(self) -> str:
        return HINTS.get(self.rule, "")
