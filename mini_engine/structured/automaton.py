"""From an expression to an automaton over bytes, by derivatives (Brzozowski, 1964).

What may still follow after some bytes is an expression again, and there are finitely many of them: these are
the states.
"""

from functools import reduce
from operator import or_
from typing import NamedTuple

from mini_engine.structured.nodes import Either, Empty, Node, Nothing, OneOf, Repeat, Sequence

START = 0
MAX_STATES = 5000  # (a|b)*a(a|b){20} would need two million


class Dfa(NamedTuple):
    """States are numbered from 0, the start."""

    transitions: list[dict[int, int]]  # of each state: {byte: the state behind it}
    accepting: set[int]


def nullable(node: Node) -> bool:
    """Return whether the empty text matches."""
    if isinstance(node, Sequence):
        return nullable(node.first) and nullable(node.second)
    if isinstance(node, Either):
        return any(map(nullable, node.options))
    return isinstance(node, Empty | Repeat)


def derivative(node: Node, byte: int) -> Node:
    """Return what must follow when a text of it has begun with this byte; Nothing() if none does."""
    if isinstance(node, Sequence):
        skipped = derivative(node.second, byte) if nullable(node.first) else Nothing()
        return derivative(node.first, byte) + node.second | skipped
    if isinstance(node, Either):
        return reduce(or_, (derivative(option, byte) for option in node.options))
    if isinstance(node, Repeat):
        return derivative(node.body, byte) + node
    return Empty() if isinstance(node, OneOf) and byte in node.allowed else Nothing()


def build_dfa(node: Node, max_states: int = MAX_STATES) -> Dfa:
    """Return the automaton of an expression. Raise ValueError if it has more than max_states states."""
    numbers: dict[Node, int] = {node: START}
    transitions: list[dict[int, int]] = [{}]
    unexplored = [node]
    while unexplored:
        state = unexplored.pop()
        row = transitions[numbers[state]]
        for byte in state.alphabet:
            after = derivative(state, byte)
            if isinstance(after, Nothing):
                continue
            if after not in numbers:
                if len(numbers) >= max_states:
                    raise ValueError(
                        f"the pattern needs more than {max_states} states; repeat less, or in fewer ways"
                    )
                numbers[after] = len(transitions)
                transitions.append({})
                unexplored.append(after)
            row[byte] = numbers[after]
    return Dfa(transitions, {number for state, number in numbers.items() if nullable(state)})
