"""The contract of lab-09 as a slow oracle: all ways to read a text are followed at once.

A way is the list of what is still to do. A request is the list of its tokens; each question goes through
its text from the beginning, and each token is tried by searching for an end behind it.
"""

from types import SimpleNamespace

from mini_engine.structured.nodes import Either, Empty, OneOf, Repeat, Sequence
from mini_engine.structured.patterns import parse


def ready(ways):
    """All ways to go on, each a tuple of nodes that begins with one byte; () where nothing is left to do."""
    seen, todo = set(), list(ways)
    while todo:
        way = todo.pop()
        if way in seen:
            continue
        seen.add(way)
        head, rest = (way[0], way[1:]) if way else (None, ())
        if isinstance(head, Empty):
            todo.append(rest)
        elif isinstance(head, Sequence):
            todo.append((head.first, head.second, *rest))
        elif isinstance(head, Either):
            todo += [(option, *rest) for option in head.options]
        elif isinstance(head, Repeat):
            todo += [rest, (head.body, head, *rest)]
    return frozenset(way for way in seen if not way or isinstance(way[0], OneOf))


def begun(node):
    """The ways of a node; ways as they are."""
    return node if isinstance(node, frozenset) else ready([(node,)])


def nullable(node):
    return () in begun(node)


def derivative(node, byte):
    return ready([way[1:] for way in begun(node) if way and byte in way[0].allowed])


def build_dfa(node, max_states=5000):
    """The sets of ways that any bytes lead to, found one after the other."""
    states, transitions = [begun(node)], []
    for ways in states:
        row = {}
        for byte in {byte for way in ways if way for byte in way[0].allowed}:
            after = derivative(ways, byte)
            if after not in states:
                states.append(after)
            row[byte] = states.index(after)
        if len(states) > max_states:
            raise ValueError(f"more than {max_states} states")
        transitions.append(row)
    accepting = [number for number, ways in enumerate(states) if nullable(ways)]
    return SimpleNamespace(transitions=transitions, accepting=accepting)


class TokenIndex:
    def __init__(self, pattern, vocabulary, eos_token_id=None):
        self.vocabulary, self.eos_token_id = vocabulary, eos_token_id
        self.start, self.found = begun(parse(pattern)), {}
        if not self.ends(self.start):
            raise ValueError("no text of this vocabulary matches")

    def behind(self, ways, token_id):
        """Return the ways after a token; none if it is not text."""
        data = self.vocabulary[token_id]
        if not data or token_id == self.eos_token_id:
            return frozenset()
        for byte in data:
            ways = derivative(ways, byte)
        return ways

    def all_behind(self, ways):
        return [self.behind(ways, token_id) for token_id in range(len(self.vocabulary))]

    def ends(self, ways):
        """Whether tokens lead from here to the end of a text: all that can be reached is looked at."""
        if ways not in self.found:
            reached = [ways]
            for one in reached:
                behind = dict.fromkeys(self.all_behind(one))
                reached += [other for other in behind if other and other not in reached]
            self.found[ways] = any(map(nullable, reached))
        return self.found[ways]


class RegexGrammar:
    def __init__(self, index):
        self.index, self.token_ids = index, []

    def allowed(self, token_ids):
        """The tokens that may follow these."""
        index, ways = self.index, self.index.start
        if index.eos_token_id in token_ids:
            return []
        for token_id in token_ids:
            ways = index.behind(ways, token_id)
        found = [one for one, after in enumerate(index.all_behind(ways)) if after and index.ends(after)]
        return found + ([index.eos_token_id] if nullable(ways) and index.eos_token_id is not None else [])

    def is_terminated(self):
        return not self.allowed(self.token_ids)

    def fill_bitmask(self, bitmask, batch_index):
        bitmask[batch_index] = sum(2**token_id for token_id in self.allowed(self.token_ids))

    def validate_tokens(self, token_ids):
        for count, token_id in enumerate(token_ids):
            if token_id not in self.allowed(self.token_ids + token_ids[:count]):
                return token_ids[:count]
        return token_ids

    def accept_tokens(self, token_ids):
        if self.validate_tokens(token_ids) != token_ids:
            return False
        self.token_ids = self.token_ids + token_ids
        return True

    def rollback(self, num_tokens):
        if num_tokens < 0 or num_tokens > len(self.token_ids):
            raise ValueError(f"{num_tokens} of {len(self.token_ids)} tokens")
        self.token_ids = self.token_ids[: len(self.token_ids) - num_tokens]
