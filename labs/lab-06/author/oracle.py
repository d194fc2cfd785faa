"""The contract of lab-06 as a slow oracle, for random_scripts.py: pages that know their whole text.

No hashes, no reference counts, no lists of free blocks. Each question is answered by looking through all
pages and all tables.
"""

from dataclasses import dataclass


def hash_block(parent, token_ids):
    """The longest name there is: everything that it must depend on."""
    return repr((bytes(parent), tuple(token_ids))).encode()


@dataclass(eq=False)
class Page:
    number: int
    text: tuple | None = None  # cache salt, and all tokens from the first to the page's last
    left: int = 0  # when its latest owner left it; 0 is never


class BlockManager:
    def __init__(
        self, num_blocks, block_size, *, enable_prefix_caching=True, watermark=None, hash_block=hash_block
    ):
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a pool has at least one block of at least one token")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.watermark = num_blocks // 100 if watermark is None else watermark
        if self.watermark < 0 or self.watermark >= num_blocks:
            raise ValueError("the watermark must leave a block that can be used")
        self.caching = enable_prefix_caching
        self.pages = [Page(number) for number in range(num_blocks)]
        self.tables = {}  # request_id: Pages
        self.departures = 0

    @property
    def num_free_blocks(self):
        return len(self._free())

    @property
    def num_cached_blocks(self):
        return sum(page.text is not None for page in self.pages)

    def block_table(self, request):
        return [page.number for page in self.tables.get(request.request_id, [])]

    def num_new_blocks(self, request, num_new_tokens):
        wanted = self._pages_for(request.num_computed_tokens + num_new_tokens)
        return max(wanted - len(self.block_table(request)), 0)

    def slot_mapping(self, request, start, end):
        table = self.block_table(request)
        slots = [number * self.block_size + offset for number in table for offset in range(self.block_size)]
        if start < 0 or end > len(slots):
            raise ValueError(f"{request.request_id} has no room at these positions")
        return slots[start:end]

    def get_computed_blocks(self, request):
        found = []
        if self.caching:
            # The end of a prefix stays below num_tokens: one token at least is left to compute.
            for end in range(self.block_size, request.num_tokens, self.block_size):
                pages = [page for page in self.pages if page.text == self._text(request, end)]
                if not pages:
                    break
                found.append(pages[0])
        return found

    def cache_blocks(self, request):
        if self.caching:
            for end in range(self.block_size, request.num_computed_tokens + 1, self.block_size):
                page = self.tables[request.request_id][end // self.block_size - 1]
                page.text = self._text(request, end)

    def admit(self, request):
        if request.request_id in self.tables:
            raise ValueError(f"{request.request_id} holds pages already")
        hits = self.get_computed_blocks(request)
        num_new = self._pages_for(request.num_tokens) - len(hits)
        room = [page for page in self._free() if page not in hits]
        if num_new > len(room) - (self.watermark if self.tables else 0):
            return False
        self.tables[request.request_id] = hits + self._emptied(room[:num_new])
        request.num_computed_tokens = request.num_cached_tokens = len(hits) * self.block_size
        return True

    def allocate(self, request, num_new_tokens):
        num_new = self.num_new_blocks(request, num_new_tokens)
        room = self._free()
        if num_new > len(room):
            return False
        if num_new:
            table = self.tables.get(request.request_id, [])
            self.tables[request.request_id] = table + self._emptied(room[:num_new])
        return True

    def free(self, request):
        for page in reversed(self.tables.pop(request.request_id, [])):
            self.departures += 1
            page.left = self.departures

    def reset_prefix_cache(self):
        if self.tables:
            return False
        self._emptied(self.pages)
        return True

    def _free(self):
        """The pages in no table, in the order in which they are given away."""
        free = [page for page in self.pages if not any(page in table for table in self.tables.values())]
        return sorted(free, key=lambda page: (page.text is not None, page.left))

    def _emptied(self, pages):
        for page in pages:
            page.text = None
        return pages

    def _text(self, request, end):
        return (request.cache_salt, tuple(request.prompt_token_ids + request.output_token_ids)[:end])

    def _pages_for(self, num_tokens):
        return (num_tokens + self.block_size - 1) // self.block_size
