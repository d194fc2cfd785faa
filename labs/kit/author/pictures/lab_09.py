"""lab-09: the automaton of a pattern that tokens walk through, and a trap."""

from labs.kit.author.pictures.sheet import OCHRE, SOFT, Sheet, solution
from labs.kit.judge import loading
from mini_engine.show.figures import style
from mini_engine.structured.nodes import Either, Empty, Node, OneOf, Repeat
from mini_engine.structured.nodes import Sequence as Both
from mini_engine.structured.patterns import parse

WIDE, HIGH = 92, 34  # a state


def words(node: Node) -> str:
    """Return an expression as a pattern."""
    if isinstance(node, OneOf):
        letters = "".join(map(chr, sorted(node.allowed)))
        return letters if len(letters) == 1 else r"\d" if letters == "0123456789" else f"[{letters}]"
    if isinstance(node, Both):
        return words(node.first) + words(node.second)
    if isinstance(node, Repeat):
        return f"({words(node.body)})*"
    if isinstance(node, Either):
        return "|".join(sorted(map(words, node.options)))
    return "(end)" if isinstance(node, Empty) else "(nothing)"


def left(pattern: str) -> list[tuple[str, dict[int, int], bool]]:
    """Return of each state what may follow in it, its transitions, and whether it is accepting."""
    lab = solution("lab-09")
    node = parse(pattern)
    dfa = lab.build_dfa(node)
    nodes = {0: node}
    for state, row in enumerate(dfa.transitions):
        for byte, after in row.items():
            nodes.setdefault(after, lab.derivative(nodes[state], byte))
    return [(words(nodes[i]), row, i in dfa.accepting) for i, row in enumerate(dfa.transitions)]


def state(sheet: Sheet, x: float, y: float, text: str, accepting: bool, trap: bool = False) -> None:
    """A state: what may follow; a second border if the text may be over."""
    edge = style.VERMILLION if trap else style.BLUE
    face = "#F4C9AC" if trap else "white"
    if accepting:
        sheet.box(x - 4, y - 4, WIDE + 8, HIGH + 8, edge=edge, radius=9)
    sheet.box(x, y, WIDE, HIGH, text, edge=edge, face=face, radius=7, family="monospace", size=10)


def letter(sheet: Sheet, x: float, y: float, byte: str) -> None:
    """The byte of an arrow."""
    sheet.text(x, y, byte, ha="center", family="monospace", weight="bold", size=10)


def automaton(sheet: Sheet) -> None:
    """(ab)*c: three states, and where the tokens of a vocabulary lead from the start."""
    found = left("(ab)*c")
    vocabulary = [b"a", b"b", b"ab", b"ba", b"abc", b"c", b""]
    index = solution("lab-09").TokenIndex("(ab)*c", vocabulary)
    places = {0: (70, 86), 1: (302, 86), 2: (534, 86)}
    sheet.title(18, 24, "the automaton of (ab)*c: in each state, what may still follow")
    for number, (text, row, accepting) in enumerate(found):
        state(sheet, *places[number], text, accepting)
        sheet.label(places[number][0] + WIDE / 2, 138 if number < 2 else 142, f"state {number}")
        for byte, after in row.items():
            (x, y), (to, _) = places[number], places[after]
            middle = (x + to + WIDE) / 2
            if after == 2 and number == 0:
                sheet.arrow((x + WIDE / 2, y), (to + WIDE / 2, y - 5), bend=-0.12)
                letter(sheet, 348, 46, chr(byte))
            elif after > number:
                sheet.arrow((x + WIDE, y + 10), (to, y + 10))
                letter(sheet, middle, y + 1, chr(byte))
            else:
                sheet.arrow((x, y + 24), (to + WIDE, y + 24))
                letter(sheet, middle, y + 36, chr(byte))
    sheet.title(18, 186, "from the start, each token is walked byte by byte")
    for line, token in enumerate(vocabulary):
        y, x = 212 + line * 21, 136
        now = 0
        sheet.code(18, y, repr(token.decode()))
        sheet.note(100, y, "state 0")
        for byte in token:
            if byte not in found[now][1]:
                sheet.note(x + 16, y, f"{chr(byte)}  cannot follow", colour=style.VERMILLION)
                break
            now = found[now][1][byte]
            sheet.note(x + 16, y, f"{chr(byte)}  state {now}", colour=SOFT)
            x += 76
        if index.mask(0) >> line & 1:
            sheet.text(430, y, f"allowed: leads to state {now}", colour=style.GREEN, size=10)
        else:
            why = "" if token else ": no text"
            sheet.text(430, y, f"not allowed{why}", colour=style.VERMILLION, size=10)


def trap(sheet: Sheet) -> None:
    """A branch that needs a digit, on a vocabulary that has none."""
    toys = loading.load("lab-09", "scenarios").TOYS["no digits"]
    pattern = r"a \d|b a"
    found, vocabulary = left(pattern), [token.encode() for token in toys[:-1]]
    index = solution("lab-09").TokenIndex(pattern, vocabulary)
    sheet.title(18, 24, r"a \d|b a, and the tokens " + "  ".join(map(repr, toys[:-1])))
    places, column = {0: (30.0, 92.0)}, {0: 0}
    for number, (_, row, _) in enumerate(found):
        for place, after in enumerate(dict.fromkeys(row.values())):
            if after not in places:
                column[after] = column[number] + 1
                y = (50, 134)[place] if number == 0 else 92 if found[after][2] else places[number][1]
                places[after] = (30 + column[after] * 164, y)
    for number, (text, row, accepting) in enumerate(found):
        x, y = places[number]
        state(sheet, x, y, text.replace(" ", "␣"), accepting, trap=number not in index.live)
        for after in dict.fromkeys(row.values()):
            byte = next(chr(one) for one, to in row.items() if to == after)
            to, high = places[after]
            missing = not any(index.walk(number, token) is not None for token in range(len(vocabulary)))
            sheet.arrow((x + WIDE, y + HIGH / 2), (to - 4 * found[after][2], high + HIGH / 2), dashed=missing)
            said = "0..9" if byte == "0" else "␣" if byte == " " else byte
            below = 1 if y == high else 5
            letter(sheet, (x + WIDE + to) / 2 + 20 * missing, (y + high) / 2 + below, said)
    sheet.text(592, 62, "no token has a digit", colour=style.VERMILLION, ha="center", size=10)
    allowed = [repr(token.decode()) for place, token in enumerate(vocabulary) if index.mask(0) >> place & 1]
    sheet.text(30, 196, f"the mask at the start allows {', '.join(allowed)}", colour=OCHRE, size=10)


PICTURES = {automaton: 364, trap: 214}  # and their heights
