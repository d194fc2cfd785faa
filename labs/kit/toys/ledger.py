"""Requests on a block manager, by name: what scenarios and random scripts of labs 05 and 06 call."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from labs.kit.toys.plays import Counted, Play, in_runs, naming, plain, steps_of
from labs.kit.toys.requests import make_request
from labs.kit.toys.scripts import Skip, builtin
from mini_engine.request import Request


class Ledger(Play):
    """Admits, computes, grows, preempts and frees requests on `kv`, a block manager of `part`.

    Any free block will do, so blocks are renamed: 0 is the first that is held, and so on.
    """

    def __init__(self, part: Any, kv: Any):
        super().__init__(part)
        self.kv, self.size = kv, kv.block_size
        self.strangers: dict[str, Request] = {}  # other objects with the ids of the requests
        self.names: dict[int, int] = {}  # of the blocks that are held: id in the pool, and name here

    # ------------------------------------------------------------------------------------- calls

    def admit(self, name: str, prompt: int | list[int], outputs: int = 0, salt: str = "") -> Any:
        """Admit a new request; its id may have been another's before, or hold blocks at the moment."""
        request = make_request(name, prompt)
        request.cache_salt, request.output_token_ids = salt, list(range(outputs))
        request.num_computed_tokens = min(3, request.num_tokens)  # of an earlier life
        if not self.table(name):
            self.requests[name] = request
        return self.enter(request)

    def admit_again(self, name: str) -> Any:
        """Admit the same request again: one that was refused, was preempted, or holds blocks."""
        return self.enter(self.known(name))

    def admit_all(self, name: str, more: int) -> Any:
        """Admit a request that needs exactly the free blocks, or some more or fewer."""
        num_tokens = (self.kv.num_free_blocks + more) * self.size
        if num_tokens < 1:
            raise Skip
        return self.admit(name, num_tokens)

    def enter(self, request: Request) -> Any:
        with naming(request.request_id):
            return self.kv.admit(request)

    def compute(self, name: str, num_tokens: int) -> int | bool:
        """Make room for a chunk and compute it. Return the number of computed tokens."""
        request = self.holder(name)
        num_tokens = min(num_tokens, request.num_new_tokens)
        if num_tokens == 0:
            raise Skip
        return self.kv.allocate(request, num_tokens) and self.count(request, num_tokens)

    def decode(self, name: str, token: int = 0) -> int | bool:
        """Compute a new output token and all that was left before it; False if it finds no room."""
        request = self.holder(name)
        if request.num_new_tokens:
            self.compute(name, request.num_new_tokens)
        request.output_token_ids.append(token)
        if not self.kv.allocate(request, 1):
            request.output_token_ids.pop()
            return False
        return self.count(request, 1)

    def count(self, request: Request, num_tokens: int) -> int:
        """Count so many tokens as computed."""
        request.num_computed_tokens += num_tokens
        return request.num_computed_tokens

    def allocate(self, name: str, num_new_tokens: int) -> Any:
        """Allocate room for so many tokens more; a request without blocks has computed nothing."""
        if not self.table(name) and name in self.requests:
            self.requests[name].num_computed_tokens = 0
        return self.kv.allocate(self.twin(name), num_new_tokens)

    def num_new_blocks(self, name: str, num_new_tokens: int) -> Any:
        return self.kv.num_new_blocks(self.twin(name), num_new_tokens)

    def slot_mapping(self, name: str, start: int, end: int) -> str:
        """Return the slots of some positions, each as the position of its place in the table."""
        table = list(self.table(name))
        if start == end > len(table) * self.size:
            raise Skip  # no position is asked for, and none is there
        with naming(name):
            slots = list(self.kv.slot_mapping(self.twin(name), start, end))
        places = [table.index(slot // self.size) if slot // self.size in table else -1 for slot in slots]
        both = zip(places, slots, strict=True)
        return in_runs(place * self.size + slot % self.size for place, slot in both)

    def last_slots(self, name: str, behind: int) -> str:
        """Return all slots of the room that a request holds, and some positions beyond."""
        return self.slot_mapping(name, 0, len(self.table(name)) * self.size + behind)

    def free(self, name: str) -> list[str] | None:
        """Free a request, given as another object with its id. Return what changes in it."""
        request = make_request(name, 3)
        request.num_computed_tokens = 2
        before = plain(request)
        self.kv.free(request)
        return [key for key, value in plain(request).items() if value != before.get(key)] or None

    def preempt(self, name: str) -> None:
        request = self.holder(name)
        self.kv.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1

    def BlockManager(self, num_blocks: int, block_size: int, watermark: int | None) -> list[int]:  # noqa: N802
        """Make another pool, which must not touch the books of this one."""
        kv = self.part.BlockManager(num_blocks, block_size, watermark=watermark)
        return [kv.num_blocks, kv.block_size, kv.watermark, kv.num_free_blocks]

    def what_costs_more_in_a_pool_of(self, num_blocks: int) -> list[str]:
        """Return the methods that work longer than in a pool of 64: they search all blocks or tables."""
        if self.is_oracle:
            return []
        small, large = (work_in_a_pool(self.part, size) for size in (64, num_blocks))
        return [name for name in small if large[name] > 5 * small[name]]

    # -------------------------------------------------------------------------------------- seen

    def seen(self) -> dict[str, Any]:
        """Return the pool, each request's blocks, and the requests, of which little may change."""
        tables = {name: list(self.table(name)) for name in sorted(self.requests)}
        held = dict.fromkeys(block for table in tables.values() for block in table)
        self.names = {block: name for block, name in self.names.items() if block in held}
        taken = {*self.names.values()}
        unused = (name for name in count() if name not in taken)
        self.names |= {block: next(unused) for block in held if block not in self.names}
        kv, requests, pool = self.kv, sorted(self.requests.items()), range(self.kv.num_blocks)
        return {
            "num_free_blocks": kv.num_free_blocks,
            "the pool": [kv.num_blocks, kv.block_size, kv.watermark],
            "block tables (renamed)": {
                name: [self.names[b] if b in pool else f"{b}, not in the pool" for b in table]
                for name, table in tables.items()
            },
            "num_computed_tokens": {name: request.num_computed_tokens for name, request in requests},
            "requests": {name: in_words(request) for name, request in requests},
        }

    def observe(self) -> dict[str, Any]:
        """Return the public state, as a log of operations shows it; `kv` checks its books if it can."""
        if hasattr(self.kv, "check"):
            self.kv.check()
        lengths = {name: len(self.table(name)) for name in self.requests}
        return {"num_free_blocks": self.kv.num_free_blocks, "lengths": lengths}

    # ----------------------------------------------------------------------------------- helpers

    def table(self, name: str) -> Any:
        """Return the blocks of a request; another object with its id is the same request."""
        if name not in self.strangers:
            self.strangers[name] = make_request(name, 3)
        return self.kv.block_table(self.strangers[name])

    def holder(self, name: str) -> Request:
        if not self.table(name):
            raise Skip
        return self.known(name)

    def twin(self, name: str) -> Request:
        """Return another object that is the same request."""
        return replace(self.requests.setdefault(name, make_request(name, 3)))


def in_words(request: Request) -> str:
    """Return what no call on the books may change, in words."""
    return (
        f"{len(request.prompt_token_ids)} + {len(request.output_token_ids)} tokens, {request.status.value}, "
        f"{request.num_cached_tokens} cached, {request.num_preemptions} preemptions, at most "
        f"{request.max_tokens}, arrival {request.arrival}, finish_reason {request.finish_reason}"
    )


def work_in_a_pool(part: Any, num_blocks: int) -> dict[str, int]:
    """Return the steps of Python and the comparisons of ids that each method takes, the fewest of five turns.

    A table in sixteen blocks is another's.
    """
    request, numbers = make_request("a", 8), range
    with builtin(range=lambda *limits: list(map(Counted, numbers(*limits)))):
        kv = part.BlockManager(num_blocks, 1, watermark=0)
        for number in numbers(num_blocks // 16):
            kv.admit(make_request(f"r{number}", 1))
        calls: dict[str, Callable[[], object]] = {
            "admit": lambda: kv.admit(request),
            "num_free_blocks": lambda: kv.num_free_blocks,
            "allocate": lambda: kv.allocate(request, 24),
            "free": lambda: kv.free(request),
        }
        turns = [{name: steps_of(call) for name, call in calls.items()} for _ in numbers(5)]
    return {name: min(turn[name] for turn in turns) for name in calls}
