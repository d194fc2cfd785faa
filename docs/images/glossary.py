"""Pictures of terms, small: docs/images/glossary/*.svg. Rows of a run are from runs of the labs' solutions.

python docs/images/glossary.py [NAME ...]
"""

import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from labs.kit.author.pictures.lab_03 import row_of
from labs.kit.author.pictures.lab_03 import run as tight_run
from labs.kit.author.pictures.sheet import SOFT, Sheet, run_of, scenario_of
from mini_engine.show.figures import style
from mini_engine.trace import Trace

FOLDER = Path(__file__).with_name("glossary")
WIDTH, LEFT, PITCH, HIGH = 350, 34, 26, 24
PICTURES: dict[str, Callable[[Sheet], None]] = {}
HEIGHTS: dict[str, float] = dict.fromkeys(("ttft", "itl", "tpot"), 70)


def picture(height: float) -> Callable[[Callable[[Sheet], None]], Callable[[Sheet], None]]:
    """Register a function that draws a term on a sheet of this height; its docstring says what is seen."""

    def register(draw: Callable[[Sheet], None]) -> Callable[[Sheet], None]:
        name = draw.__name__.replace("_", "-")
        PICTURES[name], HEIGHTS[name] = draw, height
        return draw

    return register


# Pictures of cells alone: what is seen; rows of cells (y, words, kinds, and where they are not the usual ones
# their pitch and left side); notes (x, y, words); braces (from, to, y, words).
CELLS: dict[str, tuple[str, list[Any], list[Any], list[Any]]] = {
    "budget": ("A step computes ten tokens at most: eight of one prompt, two of the next.",
        [(8, "r0 r0 r0 r0 r0 r0 r0 r0 r1 r1", "p" * 10)], [], [(34, 294, 46, "budget: 10 tokens a step")]),
    "prefill": ("Six tokens of a prompt, which are all known, are computed in one step.",
        [(8, "the king is dead , long", "pppppp", 44)], [], []),
    "decode": ("Five of six tokens are in the cache, and the newest one is computed; it gives the next.",
        [(8, "the king is dead , long", "cccccd", 44)], [(34, 48, "in the cache, and the newest")], []),
    "mixed-step": ("One step computes a token of each of three decodes, and five of a prompt.",
        [(8, "a b c r r r r r", "dddppppp")], [(34, 48, "three decodes, a chunk of r")], []),
    "static-batching": ("Three answers begin together; the slots of short ones stay empty until all end.",
        [(4, "", "dddddddd"), (30, "", "dd......"), (56, "", "ddd.....")], [], []),
    "continuous-batching": ("As soon as a short answer ends, another request takes its slot.",
        [(4, "", "dddddddd"), (30, "", "ddpddpdd"), (56, "", "dddpdddd")], [], []),
    "slot": ("Four slots, of which three are taken, so the request d is admitted next.",
        [(8, "a b c", "ddd.", 40), (8, "d", "w", 40, 254)],
        [(34, 48, "max_num_seqs = 4"), (254, 48, "waits")], []),
    "head-of-line-blocking": ("The front needs five blocks, three are free; the one behind it waits too.",
        [(8, "5 1", "ww", 60), (8, "", "eee", 26, 214)], [(34, 48, "blocks needed"), (214, 48, "free")], []),
    "num-tokens": ("Ten tokens are known, nine of them have been computed.",
        [(8, "", "cccccccccd")], [(34, 48, "num_tokens 10, num_computed_tokens 9")], []),
    "reference-count": ("Two blocks are in two tables, two in one, and two in none.",
        [(8, "2 2 1 1 0 0", "ccddee", 40)], [(34, 48, "tables that contain each; at 0 it is free")], []),
    "lru": ("Free cached blocks in the order of their last use; the one used longest ago is evicted first.",
        [(8, "4 0 7 2", "xccc", 40)], [(34, 48, "longest ago"), (134, 48, "just now")], []),
    "watermark": ("Of ten blocks six are taken; a request is admitted only if two stay free.",
        [(8, "", "ccccccee..")], [], [(242, 294, 44, "kept free")]),
    "flat-batch": ("Rows of one, one and four tokens, one behind the other; no place is empty.",
        [(8, "a b c c c c", "ddpppp")], [(34, 48, "lengths 1, 1, 4")], []),
    "left-padding": ("The same rows as a rectangle: six of its twelve places are pads, on the left.",
        [(4, "", "///d"), (32, "", "///d"), (60, "", "pppp")], [], []),
    "bonus-token": ("All three drafts are accepted, and the pass yields a fourth token.",
        [(8, "d1 d2 d3 +1", "cccd", 40)], [(34, 48, "three drafts, four tokens")], []),
    "token-mask": ("Of six tokens the grammar allows two; the others cannot be drawn.",
        [(8, "1 19 9 2 20 -", "/c//c/", 40)], [(34, 48, "at the start of (19|20)..")], []),
    "slot-mapping": ("Positions 4 and 5 of a request lie in its second block, which is block 0.",
        [(8, "4 5", "cc..eeee"), (8, "0 1 2 3", "cccc", 26, 242)],
        [(34, 48, "block table 2, 0; four slots a block"), (34, 68, "positions 4, 5 are in slots 0, 1")], []),
    "paging": ("Two requests own blocks all over the pool; each block table says in which order.",
        [(8, "a a b _ b a _ b _ a", "ccdedcedec")], [(34, 48, "a: 0, 1, 5, 9    b: 2, 4, 7")], []),
    "block": ("Two blocks of four places; the second holds two tokens so far.",
        [(8, "", "cccc"), (8, "", "cc..", 26, 150)], [],
        [(34, 138, 44, "block 0"), (150, 254, 44, "block 1")]),
}  # fmt: skip
SIXTEENTHS = [8, 4, 2, 1, 1]
# Probabilities: what is seen, the bars, how many of them are kept, and a note.
BARS: dict[str, tuple[str, list[float], int, str]] = {
    "logits": ("Five numbers, one for each token of the vocabulary.",
        [1 + math.log2(n) for n in SIXTEENTHS], 5, "one number a token"),
    "greedy": ("Of five tokens only the most probable one is taken.", [*SIXTEENTHS], 1, "the best, always"),
    "temperature": ("At a temperature of 0.5 the best of five tokens has three quarters of the probability.",
        [n**2 for n in SIXTEENTHS], 5, "0.5: steeper"),
    "top-k": ("With top_k 2, two of five tokens are left.", [*SIXTEENTHS], 2, "top_k = 2"),
    "top-p": ("With top_p 0.8, three tokens are left, because two have only 0.75 together.", [*SIXTEENTHS],
        next(n for n in range(6) if sum(SIXTEENTHS[:n]) >= 0.8 * 16), "top_p = 0.8"),
    "min-p": ("With min_p 0.2, tokens below a fifth of the best one's probability are dropped.",
        [*SIXTEENTHS], sum(n >= 0.2 * 8 for n in SIXTEENTHS), "min_p = 0.2"),
}  # fmt: skip
# Times: what is seen, and a bracket from one moment to another; tokens come at 120, 160, 200, 240 and 280.
TIMES = {
    "ttft": ("TTFT is the time from the arrival to the first token.", 0, 120, "TTFT"),
    "itl": ("ITL is the time from one token to the next.", 160, 200, "ITL"),
    "tpot": ("TPOT is the time from the first token to the last, by the number of gaps.",
        120, 280, "four gaps: TPOT is a quarter"),
}  # fmt: skip


@cache
def crowd() -> Trace:
    return run_of("lab-01", scenario_of("lab-01", "three prompts, ten tokens"))


def rows(sheet: Sheet, trace: Trace, names: tuple[str, ...], steps: int = 99) -> None:
    """The steps of some requests, a row each, with the tokens that they compute."""
    for number, name in enumerate(names):
        y = 6 + number * (HIGH + 6)
        sheet.note(LEFT - 8, y + HIGH / 2, name, ha="right")
        for column, cell in enumerate(row_of(trace, name)[:steps]):
            if cell[1] != "finished":
                sheet.cells(LEFT + column * 22, y, 22, HIGH, [cell])


def line(sheet: Sheet, y: float, words: str, kinds: str, left: float = LEFT, pitch: float = PITCH) -> None:
    """A row of cells: a letter of `kinds` each, with the words between blanks in them."""
    named = {"p": "prefill", "d": "decode", "x": "preempted", "w": "waiting", "c": "cached", ".": "unused"}
    named |= {"o": "plain", "/": "pad", "e": "empty"}
    texts = words.split(" ") if words else []
    texts += [""] * (len(kinds) - len(texts))
    cells = [(text.replace("_", ""), named[kind]) for text, kind in zip(texts, kinds, strict=True)]
    sheet.cells(left, y, pitch, HIGH, cells)


def bars(sheet: Sheet, shares: list[float], kept: int, note: str) -> None:
    """Probabilities as bars, those that are kept in colour."""
    for place, share in enumerate(shares):
        height = 62 * share / max(shares)
        face = style.BLUE if place < kept else "white"
        sheet.box(LEFT + place * 34, 72 - height, 24, height, face=face, edge=style.GREY, radius=1)
    sheet.line((LEFT - 6, 73), (LEFT + 34 * len(shares), 73), colour=SOFT)
    sheet.note(LEFT + 34 * len(shares) + 8, 40, note)


@picture(66)
def step(sheet: Sheet) -> None:
    """Two requests over five steps: a cell is what a request computes in one step."""
    rows(sheet, crowd(), ("r0", "r1"))


@picture(96)
def chunk(sheet: Sheet) -> None:
    """The prompt of r1, 8 tokens, comes in two chunks, 2 and 6: r0 has taken the rest of the first budget."""
    rows(sheet, crowd(), ("r0", "r1", "r2"))


@picture(66)
def preemption(sheet: Sheet) -> None:
    """r0 is preempted in the third step, waits, and comes back; r1 goes on."""
    rows(sheet, tight_run(), ("r1", "r0"))


@picture(66)
def recompute(sheet: Sheet) -> None:
    """Behind the preemption of r0, one step computes eleven tokens anew: its prompt and its output."""
    rows(sheet, tight_run(), ("r1", "r0"), 9)


@picture(88)
def victim(sheet: Sheet) -> None:
    """Three requests in order of priority; the last one is the victim."""
    line(sheet, 8, "a,0 b,1 c,2", "ddx", pitch=60)
    sheet.arrow((LEFT + 150, 36), (LEFT + 150, 58), colour=style.VERMILLION)
    sheet.note(LEFT, 72, "the last in order gives its memory back")


@picture(92)
def block_table(sheet: Sheet) -> None:
    """The list 5, 0, 9 leads to the blocks of these numbers in the pool."""
    sheet.code(LEFT, 16, "block_table = [5, 0, 9]")
    line(sheet, 52, "0 _ _ _ _ 5 _ _ _ 9", "ceeeeceeec")
    for place, to in ((0, 5), (1, 0), (2, 9)):
        sheet.arrow((LEFT + 118 + place * 22, 26), (LEFT + (to + 0.5) * PITCH, 50))


@picture(96)
def prefix_cache(sheet: Sheet) -> None:
    """Two requests whose first two blocks are equal have the same blocks there."""
    line(sheet, 6, "0 1 2", "ccd", pitch=40)
    line(sheet, 58, "0 1 3", "ccd", pitch=40)
    sheet.note(LEFT - 8, 18, "a", ha="right")
    sheet.note(LEFT - 8, 70, "b", ha="right")
    for place in (0, 1):
        sheet.line((LEFT + 20 + 40 * place, 32), (LEFT + 20 + 40 * place, 57), colour=SOFT)
    sheet.note(LEFT + 132, 44, "same text, same blocks")


@picture(84)
def swap(sheet: Sheet) -> None:
    """The blocks of a victim are copied to the host's memory, and back when it goes on."""
    line(sheet, 6, "", "ccc", left=LEFT)
    line(sheet, 50, "", "xxx", left=LEFT + 150)
    sheet.arrow((LEFT + 82, 20), (LEFT + 146, 56))
    sheet.arrow((LEFT + 146, 70), (LEFT + 60, 34), dashed=True)
    sheet.note(LEFT + 240, 62, "host")


@picture(112)
def attention_mask(sheet: Sheet) -> None:
    """Four queries and four keys: each query sees the keys up to its own place."""
    for row in range(4):
        line(sheet, 4 + 26 * row, "", "p" * (row + 1) + "e" * (3 - row))
    sheet.note(LEFT + 120, 56, "a row a query, a column a key")


@picture(70)
def speculative_decoding(sheet: Sheet) -> None:
    """Four drafts are computed in one pass: two are accepted, and the model's own token follows them."""
    line(sheet, 8, "d1 d2 d3 d4", "ccxx", pitch=40)
    sheet.arrow((LEFT + 168, 20), (LEFT + 196, 20))
    line(sheet, 8, "d1 d2 own", "ccd", left=LEFT + 202, pitch=38)
    sheet.note(LEFT, 52, "d3 is not what the model says")


@picture(66)
def fork(sheet: Sheet) -> None:
    """Two runs with the same steps up to the third, where one computes 1 and the other 6."""
    line(sheet, 4, "8 2 1", "ppd", pitch=34)
    line(sheet, 34, "8 2 6", "ppp", pitch=34)
    sheet.line((LEFT + 68, 2), (LEFT + 68, 62), colour=style.VERMILLION, line=2)
    sheet.note(LEFT + 116, 32, "the first difference")


def timeline(sheet: Sheet, first: float, last: float, words: str) -> None:
    """A request's time: it arrives, its first token, and those that follow; a bracket below."""
    sheet.line((LEFT, 18), (LEFT + 280, 18), colour=SOFT)
    for x in (120, 160, 200, 240, 280):
        sheet.dot(LEFT + x, 18)
    sheet.line((LEFT, 8), (LEFT, 28), colour=SOFT, line=2)
    sheet.brace(LEFT + first, LEFT + last, 44, words)


ALL = sorted([*PICTURES, *CELLS, *BARS, *TIMES])


def words(name: str) -> str:
    """Return what a picture shows, its alternative text."""
    known = CELLS.get(name) or BARS.get(name) or TIMES.get(name)
    return known[0] if known else str(PICTURES[name].__doc__)


def sheet_of(name: str) -> Sheet:
    """Draw a picture."""
    _, lines, notes, braces = CELLS.get(name, ("", [], [], []))
    low = [y + 24 for y, *_ in lines] + [y + 10 for _, y, *_ in notes] + [y + 18 for *_, y, _ in braces]
    height = max(low) + 4 if low else HEIGHTS.get(name, 84)
    sheet = Sheet(height)
    sheet.figure.set_size_inches(WIDTH / 100, height / 100)
    sheet.ax.set(xlim=(0, WIDTH), ylim=(height, 0))
    if name in PICTURES:
        PICTURES[name](sheet)
    if name in BARS:
        bars(sheet, *BARS[name][1:])
    if name in TIMES:
        timeline(sheet, *TIMES[name][1:])
    for y, text, kinds, *place in lines:
        line(sheet, y, text, kinds, **dict(zip(("pitch", "left"), place, strict=False)))
    for x, y, text in notes:
        sheet.note(x, y, text)
    for start, end, y, text in braces:
        sheet.brace(start, end, y, text)
    return sheet


def main(*names: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or ALL:
        print(f"{name}: {sheet_of(name).save(FOLDER / f'{name}.svg') / 1000:.0f} kB")


if __name__ == "__main__":
    main(*sys.argv[1:])
