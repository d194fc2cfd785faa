"""A ledger that knows the text in each slot of a pool, so that it sees who would read another's."""

from labs.kit.toys.ledger import Ledger
from labs.kit.toys.requests import make_request


class Texts(Ledger):
    """Notes for each slot the text up to the token that was computed into it, on which its keys depend."""

    def __init__(self, lab, kv, caching=True):
        super().__init__(lab, kv)
        self.caching = caching
        self.written = {}  # slot: text
        self.published = {}  # block: its text, if all of it was computed

    def count(self, request, num_tokens):
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        for position, slot in enumerate(self.kv.slot_mapping(request, start, end), start):
            self.written[slot] = self.text(request, position + 1)
            self.published.pop(slot // self.size, None)
        super().count(request, num_tokens)
        self.kv.publish(request)
        if self.caching:
            for index, block in enumerate(self.kv.block_table(request)[: end // self.size]):
                self.published[block] = self.text(request, (index + 1) * self.size)
        return end

    def reset_prefix_cache(self):
        done = self.kv.reset_prefix_cache()
        if done:
            self.published.clear()
        return done

    def text(self, request, end):
        return (request.cache_salt, *request.token_ids(0, end))

    def not_its_own(self, request):
        """The positions at which a request would read keys of another text."""
        slots = enumerate(self.kv.slot_mapping(request, 0, request.num_computed_tokens))
        return [p for p, slot in slots if self.written.get(slot) != self.text(request, p + 1)]

    def observe(self):
        """The public state; raises AssertionError when a request would read what is not its own."""
        kv, tables = self.kv, {name: list(self.table(name)) for name in self.requests}
        for name, request in self.requests.items():
            if tables[name] and (wrong := self.not_its_own(request)):
                where = f"{name} reads at position {wrong[0]} keys and values of another text"
                raise AssertionError(f"{where} (or such that were never computed)")
            if tables[name] and self.caching:
                self.can_be_found(request)
        held = {block for table in tables.values() for block in table}
        if len(held) + kv.num_free_blocks != kv.num_blocks:
            free = kv.num_free_blocks
            raise AssertionError(f"{len(held)} blocks are held and {free} free, of {kv.num_blocks}")
        lengths = {name: len(table) for name, table in tables.items() if table}
        return {
            "num_free_blocks": kv.num_free_blocks,
            "num_cached_blocks": kv.num_cached_blocks,
            "lengths": lengths,
            "shared": sum(lengths.values()) - len(held),
        }

    def can_be_found(self, request):
        """What a request holds and has computed is not evicted: a newcomer with its text must find it."""
        full = request.num_computed_tokens // self.size
        newcomer = make_request("newcomer", [*request.token_ids(0, full * self.size), 0])
        newcomer.cache_salt = request.cache_salt
        found = len(list(self.kv.find_prefix(newcomer)))
        if found != full:
            computed = f"{request.request_id} has computed {full} full blocks"
            raise AssertionError(f"{computed}, and a newcomer with the same text finds {found} of them")
