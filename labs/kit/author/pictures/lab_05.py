"""lab-05: a pool with its block tables, and the way from a position to a slot."""

from typing import Any

from labs.kit import make_request
from labs.kit.author.pictures.sheet import Look, Sheet, solution
from mini_engine.request import Request
from mini_engine.show.figures import style

BLOCKS, SIZE = 6, 4
COLOURS = {"a": style.LIGHT_ORANGE, "b": style.LIGHT_BLUE}
PLAIN: Look = {"edge": style.GREY, "line": 0.8}
MARKED: Look = {"edge": style.VERMILLION, "line": 2.4}
LARGE: Look = {"size": 11, "weight": "bold"}


def pool_of_two() -> tuple[Any, dict[str, Request]]:
    """Return a BlockManager on which a came back for a second block when b had its first already."""
    kv = solution("lab-05").BlockManager(BLOCKS, SIZE, watermark=0)
    others = [make_request(f"x{number}", SIZE) for number in range(4)]
    a, b = make_request("a", SIZE), make_request("b", SIZE)
    for request in (*others[:3], a, others[3], b):
        kv.admit(request)
    kv.free(others[1])
    a.num_computed_tokens = SIZE
    a.output_token_ids = [0, 0, 0]
    kv.allocate(a, 3)
    for request in others:
        kv.free(request)
    return kv, {"a": a, "b": b}


def middle_of(block: int) -> float:
    return 88 + block * 104


def pool(sheet: Sheet) -> None:
    """A pool of 6 blocks of 4 slots with the block tables of two requests."""
    kv, requests = pool_of_two()
    y = 158
    draw_pool(sheet, kv, requests, y)
    for x, (name, request) in zip((168, 480), requests.items(), strict=True):
        sheet.title(x, 24, f"block table of {name}")
        sheet.note(x, 45, f"{request.num_tokens} tokens, blocks of {SIZE}")
        for place, block in enumerate(kv.block_table(request)):
            sheet.box(x + place * 50, 58, 46, 30, str(block), face=COLOURS[name], **LARGE)
            sheet.arrow((x + place * 50 + 23, 91), (middle_of(block), y - 24))
    (slot,) = kv.slot_mapping(requests["a"], 7, 8)
    x = middle_of(slot // SIZE) - 36 + slot % SIZE * 24
    sheet.arrow((x, y + 82), (x, y + 64))
    sheet.label(x, y + 92, "room for a's next token")


def draw_pool(sheet: Sheet, kv: Any, requests: dict[str, Request], y: float, marked: int = -1) -> None:
    held = {
        slot: (f"{name}{position}", COLOURS[name])
        for name, request in requests.items()
        for position, slot in enumerate(kv.slot_mapping(request, 0, request.num_tokens))
    }
    for slot in range(BLOCKS * SIZE):
        block, offset = divmod(slot, SIZE)
        x, (words, face) = middle_of(block) - 48 + offset * 24, held.get(slot, ("", "none"))
        if offset == 0:
            sheet.label(x + 48, y - 12, f"block {block}" + ("" if words else ": free"))
        look = MARKED if slot == marked else PLAIN
        sheet.box(x, y, 24, 40, words, face=face, radius=0, **look)
        sheet.label(x + 12, y + 53, str(slot))
    sheet.note(30, y + 53, "slot", ha="right")


def slots(sheet: Sheet) -> None:
    """From position 2 of request a to its entry in the block table, its offset and its slot."""
    kv, requests = pool_of_two()
    request, position = requests["a"], 2
    (slot,) = kv.slot_mapping(request, position, position + 1)
    table = kv.block_table(request)
    entry, offset = divmod(position, SIZE)
    sheet.title(14, 24, "request a: where is position 2?")
    for p in range(request.num_tokens):
        look = MARKED if p == position else PLAIN
        sheet.box(150 + p * 36 + p // SIZE * 20, 46, 34, 34, str(p), face=COLOURS["a"], **look)
    sheet.note(140, 63, "position", ha="right")
    for place, block in enumerate(table):
        x, width = 150 + place * 164, 36 * min(SIZE, request.num_tokens - place * SIZE)
        middle = x + width / 2
        sheet.brace(x, x + width - 2, 90, f"entry {place}")
        sheet.box(middle - 24, 118, 48, 32, str(block), face=COLOURS["a"], edge=COLOURS["a"], **LARGE)
        sheet.arrow((middle, 152), (middle_of(block), 196))
    sheet.note(140, 134, "block table", ha="right")
    draw_pool(sheet, kv, requests, 222, marked=slot)
    sheet.code(452, 58, f"entry   {position} // {SIZE} = {entry}: block {table[entry]}")
    sheet.code(452, 82, f"offset  {position} % {SIZE} = {offset}")
    sheet.code(452, 106, f"slot    {table[entry]} * {SIZE} + {offset} = {slot}")


PICTURES = {pool: 262, slots: 300}  # and their heights
