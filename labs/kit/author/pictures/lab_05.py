"""lab-05: a pool with its block tables, and the way from a position to a slot."""

from typing import Any

from labs.kit import make_request
from labs.kit.author.pictures.sheet import Sheet, solution
from mini_engine.request import Request
from mini_engine.show.figures import style

BLOCKS, SIZE = 6, 4
COLOURS = {"a": style.LIGHT_ORANGE, "b": style.LIGHT_BLUE}
PER_BLOCK = 104  # units from block to block


def pool_of_two() -> tuple[Any, dict[str, Request]]:
    """A BlockManager on which a has come back for a second block when b had its one already."""
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


def pool() -> Sheet:
    """A pool of 6 blocks of 4 slots. Request a, with 7 tokens, holds the blocks 3 and 1, in this order;
    b, with 4 tokens, holds block 5. The blocks 0, 2 and 4 are free, and one slot of block 1 is not used
    yet."""
    kv, requests = pool_of_two()
    sheet = Sheet(262)
    y = 158
    draw_pool(sheet, kv, requests, y)
    for x, (name, request) in zip((168, 480), requests.items(), strict=True):
        sheet.title(x, 24, f"block table of {name}")
        sheet.note(x, 45, f"{request.num_tokens} tokens, blocks of {SIZE}")
        for place, block in enumerate(kv.block_table(request)):
            at = x + place * 50
            sheet.box(at, 58, 46, 30, str(block), face=COLOURS[name], edge=style.GREY, size=11, weight="bold")
            sheet.arrow((at + 23, 91), (block_x(block) + 48, y - 24))
    (slot,) = kv.slot_mapping(requests["a"], 7, 8)
    x = block_x(slot // SIZE) + slot % SIZE * 24 + 12
    sheet.arrow((x, y + 82), (x, y + 64))
    sheet.note(x, y + 92, "room for a's next token", ha="center")
    return sheet


def block_x(block: int) -> float:
    return 40 + block * PER_BLOCK


def owner(kv: Any, requests: dict[str, Request], block: int) -> str:
    return next((name for name, request in requests.items() if block in kv.block_table(request)), "")


def draw_pool(sheet: Sheet, kv: Any, requests: dict[str, Request], y: float, marked: int = -1) -> None:
    names = {}
    for name, request in requests.items():
        for position, slot in enumerate(kv.slot_mapping(request, 0, request.num_tokens)):
            names[slot] = f"{name}{position}"
    for block in range(BLOCKS):
        x, name = block_x(block), owner(kv, requests, block)
        sheet.note(x + 48, y - 12, f"block {block}" + ("" if name else ": free"), ha="center")
        for offset in range(SIZE):
            slot = block * SIZE + offset
            words = names.get(slot, "")
            face = COLOURS.get(name, "none") if words else "none"
            edge, line = (style.VERMILLION, 2.4) if slot == marked else (style.GREY, 0.8)
            sheet.box(x + offset * 24, y, 24, 40, words, face=face, edge=edge, radius=0, line=line)
            sheet.note(x + offset * 24 + 12, y + 53, str(slot), ha="center")
    sheet.note(30, y + 53, "slot", ha="right")


def slots() -> Sheet:
    """From a position to its slot: position 2 of request a is in entry 2 // 4 = 0 of its block table,
    which is block 3, at offset 2 % 4 = 2; its slot is 3 * 4 + 2 = 14."""
    kv, requests = pool_of_two()
    request, position = requests["a"], 2
    (slot,) = kv.slot_mapping(request, position, position + 1)
    table = kv.block_table(request)
    entry, offset = divmod(position, SIZE)
    sheet = Sheet(300)
    sheet.title(14, 24, "request a: where is position 2?")
    for p in range(request.num_tokens):
        edge, line = (style.VERMILLION, 2.4) if p == position else (style.GREY, 0.8)
        x = 150 + p * 36 + (p // SIZE) * 20
        sheet.box(x, 46, 34, 34, str(p), face=COLOURS["a"], edge=edge, line=line)
    sheet.note(140, 63, "position", ha="right")
    for place, block in enumerate(table):
        x = 150 + place * (4 * 36 + 20)
        sheet.brace(x, x + 36 * min(SIZE, request.num_tokens - place * SIZE) - 2, 90, f"entry {place}")
        middle = x + 18 * min(SIZE, request.num_tokens - place * SIZE)
        sheet.box(
            middle - 24, 118, 48, 32, str(block), face=COLOURS["a"], edge=COLOURS["a"], size=11, weight="bold"
        )
        sheet.arrow((middle, 152), (block_x(block) + 48, 196))
    sheet.note(140, 134, "block table", ha="right")
    draw_pool(sheet, kv, requests, 222, marked=slot)
    lines = (
        f"entry   {position} // {SIZE} = {entry}: block {table[entry]}",
        f"offset  {position} % {SIZE} = {offset}",
        f"slot    {table[entry]} * {SIZE} + {offset} = {slot}",
    )
    for row, words in enumerate(lines):
        sheet.text(452, 58 + row * 24, words, family="monospace", size=10)
    return sheet


PICTURES = (pool, slots)
