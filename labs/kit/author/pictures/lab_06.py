"""lab-06: names that chain, and the three places of a block."""

from typing import Any

from labs.kit import make_request
from labs.kit.author.pictures.sheet import Sheet, solution
from labs.kit.judge import loading
from mini_engine.show.figures import style

TEXTS = {"a": "the cat sat on the mat and slept all day", "b": "the cat sat on the mat and purred all night"}
SIZE = 4
COLUMNS = (84, 292, 500)
COLOURS = {"a, b": style.LIGHT_GREEN, "a": style.LIGHT_ORANGE, "b": style.LIGHT_BLUE}


def sharing() -> tuple[Any, dict[str, Any]]:
    """Return a BlockManager and two requests, the second admitted when the first was computed."""
    words = sorted({word for text in TEXTS.values() for word in text.split()})
    kv = solution("lab-06").BlockManager(8, SIZE, watermark=0)
    requests = {name: make_request(name, [words.index(w) for w in t.split()]) for name, t in TEXTS.items()}
    for request in requests.values():
        kv.admit(request)
        request.num_computed_tokens = request.num_tokens
        kv.cache_blocks(request)
    return kv, requests


def chain(sheet: Sheet) -> None:
    """Two requests whose first four words are equal, the names of their blocks, and the pool."""
    kv, requests = sharing()
    y = 164
    sheet.note(14, y + 17, "the pool")
    for name, top in (("a", 22), ("b", 258)):
        sheet.title(14, top, name)
        draw_names(sheet, requests[name], TEXTS[name].split(), top + 14)
    tables = {name: kv.block_table(request) for name, request in requests.items()}
    for index, x in enumerate(COLUMNS):
        blocks = dict.fromkeys(table[index] for table in tables.values())
        for place, block in enumerate(blocks):
            holders = [name for name, table in tables.items() if block in table]
            middle = x + 85 + (place - (len(blocks) - 1) / 2) * 90
            words = f"block {block}" + (f"\nref_count {len(holders)}" if holders[1:] else "")
            sheet.box(middle - 41, y - 2, 82, 38, words, face=COLOURS[", ".join(holders)], va="center")
            for name in holders:
                start, end = (108, y - 6) if name == "a" else (268, y + 40)
                sheet.arrow((x + 85, start), (middle, end))


def draw_names(sheet: Sheet, request: Any, words: list[str], y: float) -> None:
    """A request's blocks in a row, each with how its name is made."""
    before, parent = "salt", request.cache_salt.encode()
    for index, x in enumerate(COLUMNS):
        tokens = words[index * SIZE : (index + 1) * SIZE]
        full = len(tokens) == SIZE
        sheet.box(x, y, 170, 32, " ".join(tokens), face="white" if full else "none", dashed=not full, size=10)
        if full:
            ids = tuple(request.token_ids(index * SIZE, (index + 1) * SIZE))
            parent = solution("lab-06").hash_block(parent, ids)
            name = parent.hex()[:4]
            sheet.text(x + 85, y + 47, f"H({before}, tokens) = {name}", ha="center", family="monospace")
            before = name
        else:
            sheet.label(x + 85, y + 47, "not full: no name yet")
        if index:
            sheet.arrow((x - 36, y + 16), (x - 3, y + 16))


def places(sheet: Sheet) -> None:
    """The three places of a block, and below them a run on four blocks."""
    y = 44
    for x, kind, name, words in (
        (14, "empty", "free_blocks", "nothing to be found\nref_count 0"),
        (270, "decode", "in a table", "held by one or more\nref_count 1, 2, ..."),
        (526, "cached", "free_cached", "free, and can be found\nref_count 0"),
    ):
        sheet.cell(x, y, 160, 80, "", kind, radius=8)
        sheet.title(x + 80, y + 20, name, ha="center")
        sheet.text(x + 80, y + 52, words, ha="center", va="center")
    for x, above, words, below in (
        (222, 13, "take", "free,\nwithout a name"),
        (478, 22, "free,\nwith a name", "admit:\na hit"),
    ):
        sheet.arrow((x - 45, y + 22), (x + 45, y + 22))
        sheet.arrow((x + 45, y + 56), (x - 45, y + 56))
        sheet.label(x, y + 22 - above, words, va="center")
        sheet.label(x, y + 80, below, va="center")
    sheet.arrow((606, y + 83), (350, y + 83), bend=-0.32, dashed=True, colour=style.VERMILLION)
    words = "take, when free_blocks is empty: evicted, its name forgotten"
    sheet.label(478, y + 140, words, colour=style.VERMILLION)
    draw_blocks(sheet, 262)


def draw_blocks(sheet: Sheet, y: float) -> None:
    """The places of four blocks, operation by operation, in one of the lab's scenarios."""
    scenarios = loading.load("lab-06", "scenarios")
    scenario = scenarios.NAMED["kept after the end, evicted when needed"]
    kv = scenarios.make(solution("lab-06"), **scenario["config"])
    ledger = scenarios.Texts(solution("lab-06"), kv)
    sheet.title(14, y - 40, "four blocks in a run")
    left, width = 66, 622 / len(scenario["ops"])
    for column, (name, *arguments) in enumerate(scenario["ops"]):
        getattr(ledger, name)(*arguments)
        x = left + column * width
        words = f"{name.replace('compute', 'step')}\n{arguments[0]}"
        sheet.label(x + width / 2, y - 15, words, va="center")
        for block in range(kv.num_blocks):
            holders = [rid for rid in sorted(ledger.requests) if block in ledger.table(rid)]
            kind = "decode" if holders else "cached" if block in kv.free_cached else "empty"
            sheet.cells(x, y + block * 28, width, 24, [(" ".join(holders), kind)])
            if column == 0:
                sheet.note(left - 8, y + block * 28 + 12, f"block {block}", ha="right")
    sheet.legend(left, y + 132, ("decode", "in a table"), ("cached", "free_cached"), ("empty", "free_blocks"))


PICTURES = {chain: 352, places: 420}  # and their heights
