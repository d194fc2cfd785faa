"""lab-06: names that chain, and the three places of a block."""

from typing import Any

from labs.kit import make_request
from labs.kit.author.pictures.sheet import SOFT, Sheet, solution
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
        kv.publish(request)
    return kv, requests


def chain() -> Sheet:
    """Two requests whose first four words are equal. Each full block is named by a hash of its tokens and of
    the name before it: the first names are equal, so both block tables name block 0; the second ones differ,
    and the last blocks are not full and have no name."""
    kv, requests = sharing()
    hash_block = solution("lab-06").hash_block
    sheet = Sheet(380)
    for place, (name, request) in enumerate(requests.items()):
        y = 40 + place * 210
        words = TEXTS[name].split()
        table, parent = kv.block_table(request), request.cache_salt.encode()
        sheet.title(16, y + 17, name)
        sheet.note(60, y + 17, "salt")
        x = 100
        for index, block in enumerate(table):
            tokens = words[index * SIZE : (index + 1) * SIZE]
            full = len(tokens) == SIZE
            shared = sum(block in kv.block_table(other) for other in requests.values()) > 1
            face = style.LIGHT_GREEN if shared else (style.LIGHT_ORANGE, style.LIGHT_BLUE)[place]
            sheet.box(
                x,
                y,
                170,
                34,
                " ".join(tokens),
                face=face if full else "none",
                edge=style.GREY,
                dashed=not full,
                size=10,
            )
            hashed = "no name: not full"
            if full:
                parent = hash_block(parent, tuple(request.token_ids(index * SIZE, (index + 1) * SIZE)))
                hashed = parent.hex()[:6]
            sheet.text(
                x + 85,
                y + 50,
                hashed,
                ha="center",
                family="monospace" if full else "sans-serif",
                colour="#1A1A1A" if full else SOFT,
            )
            sheet.note(x + 85, y + 70, f"block {block}", ha="center")
            if index:
                sheet.arrow((x - 26, y + 17), (x - 3, y + 17))
            else:
                sheet.arrow((x - 14, y + 17), (x - 3, y + 17))
            x += 198
    return sheet


def places() -> Sheet:
    """A block is in one of three places: in a table (held by one request or several), free and without
    content, or free and cached, where it can still be found. Admission takes free blocks, or shares and takes
    back cached ones; free gives them back, with a name to the cached ones; eviction forgets the name."""
    sheet = Sheet(330)
    boxes = {
        "free": (40, 60, "empty", "free_blocks", "nothing to be found\nref_count 0"),
        "table": (270, 60, "decode", "in a table", "held by one or more\nref_count ≥ 1"),
        "cached": (500, 60, "cached", "free_cached", "free, can be found\nref_count 0"),
    }
    for x, y, kind, name, words in boxes.values():
        sheet.cell(x, y, 160, 84, "", kind, radius=8)
        sheet.text(x + 80, y + 22, name, size=11, weight="bold", ha="center")
        sheet.text(x + 80, y + 55, words, ha="center", va="center")
    sheet.arrow((202, 80), (268, 80))
    sheet.note(235, 66, "take", ha="center")
    sheet.arrow((268, 124), (202, 124))
    sheet.note(235, 160, "free:\nno name", ha="center", va="center")
    sheet.arrow((432, 80), (498, 80))
    sheet.note(465, 50, "free: it\nhas a name", ha="center", va="center")
    sheet.arrow((498, 124), (432, 124))
    sheet.note(465, 160, "admit:\na hit", ha="center", va="center")
    sheet.arrow((580, 146), (350, 146), bend=-0.3, dashed=True, colour=style.VERMILLION)
    sheet.note(
        465, 210, "take, when free_blocks is empty:\nevicted, the name forgotten", ha="center", va="center"
    )
    return sheet


PICTURES = (chain, places)
