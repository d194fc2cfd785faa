"""A ledger of the text in each slot of a pool, which finds requests that would read another's."""

from collections.abc import Callable
from typing import Any

from labs.kit.toys.ledger import Ledger
from labs.kit.toys.requests import make_request
from mini_engine.request import Request


class Texts(Ledger):
    """Notes for each slot the text up to the token that was computed into it, on which its keys depend."""

    def __init__(self, lab: Any, kv: Any, caching: bool = True):
        super().__init__(lab, kv)
        self.caching = caching
        self.written: dict[int, tuple[Any, ...]] = {}  # slot: text
        self.published: dict[int, tuple[Any, ...]] = {}  # block: its text, if all of it was computed

    def enter(self, request: Request) -> Any:
        admitted = super().enter(request)
        if admitted:
            self.given_away(request.request_id, request.num_cached_tokens // self.size)
        return admitted

    def allocate(self, name: str, num_new_tokens: int) -> Any:
        before = len(self.table(name))
        allocated = super().allocate(name, num_new_tokens)
        self.given_away(name, before)
        return allocated

    def given_away(self, name: str, start: int) -> None:
        """Forget the texts in the blocks of a table from `start` on."""
        for block in self.table(name)[start:]:
            self.published.pop(block, None)

    def count(self, request: Request, num_tokens: int) -> int:
        start = request.num_computed_tokens
        end = start + num_tokens
        for position, slot in enumerate(self.kv.slot_mapping(request, start, end), start):
            self.written[slot] = self.text(request, position + 1)
            self.published.pop(slot // self.size, None)
        super().count(request, num_tokens)
        self.kv.cache_blocks(request)
        if self.caching:
            for index, block in enumerate(self.kv.block_table(request)[: end // self.size]):
                self.published[block] = self.text(request, (index + 1) * self.size)
        return end

    def reset_prefix_cache(self) -> bool:
        done: bool = self.kv.reset_prefix_cache()
        if done:
            self.published.clear()
        return done

    def text(self, request: Request, end: int) -> tuple[Any, ...]:
        return (request.cache_salt, *request.token_ids(0, end))

    def not_its_own(self, request: Request) -> list[int]:
        """Return the positions at which a request would read keys of another text."""
        slots = enumerate(self.kv.slot_mapping(request, 0, request.num_computed_tokens))
        return [p for p, slot in slots if self.written.get(slot) != self.text(request, p + 1)]

    def observe(self) -> dict[str, Any]:
        """Return the public state. Raise AssertionError if a request would read another text."""
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
            "num_computed_tokens": {name: self.requests[name].num_computed_tokens for name in lengths},
            "shared": sum(lengths.values()) - len(held),
        }

    def can_be_found(self, request: Request) -> None:
        """Raise AssertionError unless a newcomer finds all full blocks that the request has computed."""
        full = request.num_computed_tokens // self.size
        newcomer = make_request("newcomer", [*request.token_ids(0, full * self.size), 0])
        newcomer.cache_salt = request.cache_salt
        found = len(list(self.kv.get_computed_blocks(newcomer)))
        if found != full:
            computed = f"{request.request_id} has computed {full} full blocks"
            raise AssertionError(f"{computed}, and a newcomer with the same text finds {found} of them")


def wrong_books(kv: Any) -> str:
    """Return what is wrong in the attributes that lab-06's starter keeps, or "nothing".

    A class that keeps others is not looked at: it has books of its own.
    """
    cached, blocks = getattr(kv, "cached", None), getattr(kv, "blocks", None)
    if not isinstance(cached, dict) or not isinstance(blocks, list) or not hasattr(blocks[0], "hash"):
        return "nothing"
    if not all(cached.values()):
        return "self.cached has a hash with an empty list"
    findable = {id(block) for candidates in cached.values() for block in candidates}
    for block in blocks:
        for field in ("hash", "content"):
            if id(block) not in findable and getattr(block, field) is not None:
                return f"block {block.block_id} cannot be found, and its {field} is not None"
    try:
        kv.check()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def wrong_names(kv: Any, hash_block: Callable[[bytes, tuple[int, ...]], bytes]) -> list[str]:
    """The names that `hash_block` does not give for the content of the block, one block after the other.

    A class whose blocks have no hash or no content is not looked at.
    """
    wrong, blocks = [], getattr(kv, "blocks", None)
    for block in blocks if isinstance(blocks, list) else ():
        name, content = getattr(block, "hash", None), getattr(block, "content", None)
        if name is not None and content is not None:
            salt, tokens = content
            right = salt.encode()
            for start in range(0, len(tokens), kv.block_size):
                right = hash_block(right, tuple(tokens[start : start + kv.block_size]))
            if name != right:
                wrong.append(f"the block with {list(tokens)} goes by {name!r}, not by {right!r}")
    return wrong
