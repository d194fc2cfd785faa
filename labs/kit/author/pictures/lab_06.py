"""lab-06: names that chain, and the three places of a block."""

from typing import Any

from labs.kit import make_request
from labs.kit.author.pictures.sheet import Sheet, solution
from labs.kit.judge import loading
from mini_engine.show.figures import style

TEXTS = {
    "a": "the cat sat on the mat and slept all day",
    "b": "the cat sat on the mat and purred all night",
}
SIZE = 4


def sharing() -> tuple[Any, dict[str, Any]]:
    """Two requests on one BlockManager, the second admitted when the first was computed; words are tokens."""
    words = sorted({word for text in TEXTS.values() for word in text.split()})
    kv = solution("lab-06").BlockManager(8, SIZE, watermark=0)
    requests = {name: make_request(name, [words.index(w) for w in t.split()]) for name, t in TEXTS.items()}
    for request in requests.values():
        kv.admit(request)
        request.num_computed_tokens = request.num_tokens
        kv.cache_blocks(request)
    return kv, requests


def chain() -> Sheet:
    """Two requests whose first four words are equal. Each full block is named by a hash of the name
    before it and of its own tokens: the first names are equal, so both block tables name block 0; the
    second ones differ, and the last blocks are not full and have no name."""
    kv, requests = sharing()
    sheet = Sheet(352)
    sheet.title(14, 22, "a")
    sheet.title(14, 258, "b")
    draw_names(sheet, kv, requests["a"], TEXTS["a"].split(), 36)
    draw_names(sheet, kv, requests["b"], TEXTS["b"].split(), 272)
    pool = 164
    sheet.note(14, pool + 17, "the pool")
    tables = {name: kv.block_table(request) for name, request in requests.items()}
    for index in range(3):
        blocks = dict.fromkeys(table[index] for table in tables.values())
        for place, block in enumerate(blocks):
            holders = [name for name, table in tables.items() if block in table]
            middle = COLUMNS[index] + 85 + (place - (len(blocks) - 1) / 2) * 90
            words = f"block {block}" + (f"\nref_count {len(holders)}" if holders[1:] else "")
            look: dict[str, Any] = {"face": COLOURS["both" if holders[1:] else holders[0]], "va": "center"}
            sheet.box(middle - 41, pool - 2, 82, 38, words, **look)
            if "a" in holders:
                sheet.arrow((COLUMNS[index] + 85, 108), (middle, pool - 6))
            if "b" in holders:
                sheet.arrow((COLUMNS[index] + 85, 268), (middle, pool + 40))
    return sheet


COLUMNS = (84, 292, 500)
COLOURS = {"both": style.LIGHT_GREEN, "a": style.LIGHT_ORANGE, "b": style.LIGHT_BLUE}


def draw_names(sheet: Sheet, kv: Any, request: Any, words: list[str], y: float) -> None:
    """A request's blocks in a row, each with how its name is made."""
    hash_block = solution("lab-06").hash_block
    before, parent = "salt", request.cache_salt.encode()
    for index, x in enumerate(COLUMNS):
        tokens = words[index * SIZE : (index + 1) * SIZE]
        full = len(tokens) == SIZE
        sheet.box(x, y, 170, 32, " ".join(tokens), face="white" if full else "none", dashed=not full, size=10)
        if full:
            parent = hash_block(parent, tuple(request.token_ids(index * SIZE, (index + 1) * SIZE)))
            name = parent.hex()[:4]
            sheet.text(x + 85, y + 47, f"H({before}, tokens) = {name}", ha="center", family="monospace")
            before = name
        else:
            sheet.note(x + 85, y + 47, "not full: no name yet", ha="center")
        if index:
            sheet.arrow((x - 36, y + 16), (x - 3, y + 16))


def places() -> Sheet:
    """A block is in one of three places: in a table (held by one request or several), free and without
    content, or free and cached, where it can still be found. Below them a run on four blocks: kept when
    a is done, shared by c, evicted by d."""
    sheet = Sheet(420)
    y = 44
    for x, kind, name, words in (
        (14, "empty", "free_blocks", "nothing to be found\nref_count 0"),
        (270, "decode", "in a table", "held by one or more\nref_count 1, 2, ..."),
        (526, "cached", "free_cached", "free, and can be found\nref_count 0"),
    ):
        sheet.cell(x, y, 160, 80, "", kind, radius=8)
        sheet.text(x + 80, y + 20, name, size=11, weight="bold", ha="center")
        sheet.text(x + 80, y + 52, words, ha="center", va="center")
    for x, above, below in (
        (222, "take", "free,\nwithout a name"),
        (478, "free,\nwith a name", "admit:\na hit"),
    ):
        right = y + (22 if above == "take" else 22)
        sheet.arrow((x - 45, right), (x + 45, right))
        sheet.arrow((x + 45, y + 56), (x - 45, y + 56))
        sheet.note(x, right - (13 if above == "take" else 22), above, ha="center", va="center")
        sheet.note(x, y + 80, below, ha="center", va="center")
    sheet.arrow((606, y + 83), (350, y + 83), bend=-0.32, dashed=True, colour=style.VERMILLION)
    sheet.text(
        478,
        y + 140,
        "take, when free_blocks is empty: evicted, its name forgotten",
        ha="center",
        colour=style.VERMILLION,
    )
    draw_blocks(sheet, 262)
    return sheet


def draw_blocks(sheet: Sheet, y: float) -> None:
    """Where four blocks are, operation by operation, in one of the lab's own scenarios."""
    scenarios = loading.load("lab-06", "scenarios")
    scenario = scenarios.NAMED["kept after the end, evicted when needed"]
    kv = scenarios.make(solution("lab-06"), **scenario["config"])
    ledger = scenarios.Texts(solution("lab-06"), kv)
    sheet.title(14, y - 40, "four blocks in a run")
    left, width = 66, 622 / len(scenario["ops"])
    for block in range(kv.num_blocks):
        sheet.note(left - 8, y + block * 28 + 12, f"block {block}", ha="right")
    for column, (name, *arguments) in enumerate(scenario["ops"]):
        getattr(ledger, name)(*arguments)
        x = left + column * width
        sheet.note(
            x + width / 2,
            y - 15,
            f"{name.replace('compute', 'step')}\n{arguments[0]}",
            ha="center",
            va="center",
        )
        for block in range(kv.num_blocks):
            holders = [rid for rid in sorted(ledger.requests) if block in ledger.table(rid)]
            kind = "decode" if holders else "cached" if block in kv.free_cached else "empty"
            sheet.cell(x + 1, y + block * 28, width - 2, 24, " ".join(holders), kind)
    sheet.legend(left, y + 132, ("decode", "in a table"), ("cached", "free_cached"), ("empty", "free_blocks"))


PICTURES = (chain, places)
