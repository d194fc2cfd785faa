"""Prefill and decode on separate engines: blocks of keys and values go from one pool to another.

vLLM's KVConnector, without its seams in scheduler and model runner: what arrives is put into the prefix
cache, where the scheduler finds it like any other prefix. So what is evicted again is merely computed anew.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from mini_engine.attention import KVPool, PagedBackend
from mini_engine.engine import Engine
from mini_engine.fallbacks import recoverable_kv
from mini_engine.input_processor import Prompt, take_apart
from mini_engine.interfaces import RecoverableKV
from mini_engine.llm import LLM
from mini_engine.request import Request, SamplingParams

Address = tuple[str, int]
PROBE = "kv-connector"  # the id of a request that holds blocks while they are read or written
MOST = 2**24  # bytes of a question
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)  # which a prompt is computed for


class Moved(NamedTuple):
    """The outcome of a prompt's hand-over: the tokens that need not be computed here, and its bytes."""

    num_tokens: int
    num_bytes: int


class KVConnector:
    """One end of a hand-over: an engine whose pool gives blocks (kv_producer) or takes them (kv_consumer).

    Raises ValueError for an engine without pages or without prefix cache. As the engine itself, it serves one
    thread at a time.
    """

    def __init__(self, engine: Engine):
        kv, backend = engine.scheduler.kv, engine.backend
        if not (isinstance(backend, PagedBackend) and isinstance(kv, RecoverableKV)):
            raise ValueError("blocks are handed over between paged pools; use the engine's own backend")
        if not kv.enable_prefix_caching:
            raise ValueError("blocks arrive in the prefix cache; set enable_prefix_caching=True")
        self.llm, self.engine, self.pool = LLM.from_engine(engine), engine, backend.pool
        self.kind = _kind(engine, self.pool)

    # -------------------------------------------------------------------------- the decode engine

    def load_kv(self, connection: Connection, prompt: Prompt, cache_salt: str = "") -> Moved:
        """Let the engine at the other end compute a prompt, and take its blocks that are not here yet.

        The prompt's last token is left to compute, as after any hit. Raises ValueError for a prompt that
        either engine refuses and for engines that differ, OSError or EOFError if the connection is lost.
        """
        token_ids = self._token_ids(prompt)
        with self._admitted(token_ids, cache_salt) as (request, table):
            first = request.num_computed_tokens // self.pool_size
            last = (len(token_ids) - 1) // self.pool_size
            if not table or first >= last:  # no room, or all is here
                return Moved(0, 0)
            numbers = {"token_ids": torch.tensor(token_ids), "first": torch.tensor(first)}
            connection.send_bytes(_packed(numbers, kind=self.kind, cache_salt=cache_salt))
            data = connection.recv_bytes()
            found = load(data)
            if "error" in found:
                raise ValueError(f"the prefill engine refuses: {_text(found['error'])}")
            arrived = found["k"].shape[1]
            blocks = table[first : first + arrived]
            for pool, values in ((self.pool.k, found["k"]), (self.pool.v, found["v"])):
                pool[:, blocks] = values.to(pool.device)
            request.num_computed_tokens = (first + arrived) * self.pool_size
            self.engine.scheduler.kv.cache_blocks(request)
        return Moved(arrived * self.pool_size, len(data))

    # ------------------------------------------------------------------------- the prefill engine

    def serve(self, listener: Listener) -> None:
        """Answer decode engines, one connection after the other, until the listener is closed (OSError)."""
        while True:
            try:
                connection = listener.accept()
            except (AuthenticationError, EOFError, ConnectionError):  # no key, or gone already
                continue
            with connection, suppress(EOFError, OSError):
                while True:
                    connection.send_bytes(self._answer(connection.recv_bytes(MOST)))

    def _answer(self, data: bytes) -> bytes:
        try:
            asked = load(data)
            if (theirs := _text(asked["kind"])) != self.kind:
                raise ValueError(f"the engines differ: it has {self.kind}, the other {theirs}")
            token_ids, first = asked["token_ids"].tolist(), int(asked["first"])
            k, v = self.save_kv(token_ids, first, _text(asked["cache_salt"]))
        except (ValueError, KeyError, SafetensorError) as error:
            return _packed({}, error=str(error))
        return _packed({"k": k, "v": v})

    def save_kv(self, token_ids: list[int], first: int = 0, cache_salt: str = "") -> tuple[Tensor, Tensor]:
        """Compute a prompt. Return its keys and values from a block on, but for those of the last token's
        block: (num_layers, num_blocks, block_size, num_kv_heads, head_dim) each, on the CPU."""
        prompt = {"prompt_token_ids": token_ids, "cache_salt": cache_salt}
        self.llm.generate(prompt, ONE_TOKEN, use_tqdm=False)
        with self._admitted(token_ids, cache_salt) as (request, table):
            blocks = table[first : request.num_computed_tokens // self.pool_size]
            return self.pool.k[:, blocks].cpu(), self.pool.v[:, blocks].cpu()

    # ------------------------------------------------------------------------------- either engine

    @property
    def pool_size(self) -> int:
        """The tokens of a block."""
        return self.engine.scheduler.kv.block_size

    def _token_ids(self, prompt: Prompt) -> list[int]:
        given = take_apart("prompt", prompt)
        if given.token_ids is not None:
            return [*given.token_ids]
        if self.engine.tokenizer is None:
            raise ValueError("a model without a tokenizer needs token ids")
        return self.engine.tokenizer.encode(given.text or "")

    @contextmanager
    def _admitted(self, token_ids: list[int], cache_salt: str) -> Iterator[tuple[Request, list[int]]]:
        """Hold a prompt's blocks: yield a request and its table, which is empty if there is no room."""
        kv = self.engine.scheduler.kv
        request = Request(PROBE, token_ids, cache_salt=cache_salt)
        kv.admit(request)
        try:
            yield request, kv.block_table(request)
        finally:
            recoverable_kv(kv).unadmit(request)  # what was cached stays, and no statistics have seen it


def _kind(engine: Engine, pool: KVPool) -> str:
    """Return what must be alike at both ends: shapes, type, and the weights, by those of the last norm."""
    weights = sha256(engine.model.norm.weight.float().cpu().numpy().tobytes()).hexdigest()[:12]
    layers, _, size, heads, dim = pool.k.shape
    kind = {"layers": layers, "block_size": size, "kv_heads": heads, "head_dim": dim}
    return json.dumps(kind | {"dtype": str(pool.k.dtype), "weights": weights})


def _packed(tensors: dict[str, Tensor], **texts: str) -> bytes:
    """Return a message: safetensors, which runs nothing when it is read, and texts as tensors of bytes."""
    said = {name: torch.tensor([*text.encode()], dtype=torch.uint8) for name, text in texts.items()}
    return save(tensors | said)


def _text(value: Tensor) -> str:
    return bytes(value.tolist()).decode()


def connect(address: Address, key: str | None = None) -> Connection:
    """Return a connection to a prefill engine. Raises ConnectionError, or AuthenticationError without key."""
    return Client(address, authkey=key.encode() if key else None)


def listen(address: Address, key: str | None = None) -> Listener:
    """Return a listener for decode engines, which need the same key."""
    return Listener(address, authkey=key.encode() if key else None)
