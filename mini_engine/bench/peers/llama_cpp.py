"""llama.cpp through llama-cpp-python: all sequences in one context, decodes of a step in one batch.

Its batch API is C's: the loop here is what llama.cpp's own `batched` example and server do: decodes
first, then pieces of prompts, as many tokens in a call as n_batch allows.
"""

import ctypes
from typing import Any

import llama_cpp as c
import numpy as np

BATCH = 512  # tokens in a call, as in llama.cpp's own programs (n_ubatch)
# Bytes alike; F16 is its quickest, which its own programs have beside weights of 4 bits.
KV_TYPES = {"float32": c.GGML_TYPE_F32, "bfloat16": c.GGML_TYPE_F16, "q4": c.GGML_TYPE_F16}


class Peer:
    def __init__(self, gguf: str, dtype: str, threads: int, **_: Any) -> None:
        self.quiet = c.llama_log_callback(lambda *_: None)  # kept alive: C holds it
        c.llama_log_set(self.quiet, ctypes.c_void_p(0))
        c.llama_backend_init()
        self.model = c.llama_model_load_from_file(gguf.encode(), c.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp could not read {gguf}")
        self.vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        self.dtype, self.threads = dtype, threads
        self.context: Any = None
        self.shape: tuple[int, int] | None = None
        self.batch = c.llama_batch_init(BATCH, 0, 1)
        kv = "F32" if dtype == "float32" else "F16"
        self.versions = {"llama-cpp-python": c.__version__}
        self.settings = (
            f"flash attention, {threads} threads for prompts and for tokens, all sequences in one context, "
            f"n_batch {BATCH}, KV cache {kv}"
        )

    def variant(self, name: str) -> tuple[Any, str]:
        return self.serve, self.settings

    def open(self, num_sequences: int, num_tokens: int) -> None:
        """A context with room for so many sequences and tokens; it is kept while it fits."""
        if self.shape == (num_sequences, num_tokens):
            c.llama_memory_clear(c.llama_get_memory(self.context), False)
            return
        if self.context:
            c.llama_free(self.context)
        params = c.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_tokens, num_sequences
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = KV_TYPES[self.dtype]
        params.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = True
        self.context = c.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp made no context of {num_tokens} tokens")
        self.shape = (num_sequences, num_tokens)

    def serve(self, prompts: list[list[int]], num_outputs: list[int]) -> list[list[int]]:
        room = sum(map(len, prompts)) + sum(num_outputs)
        self.open(len(prompts), -(-room // 256) * 256)
        outputs: list[list[int]] = [[] for _ in prompts]
        num_computed = [0] * len(prompts)
        left = set(range(len(prompts)))
        while left:
            # Decodes are short: they go first, so that every started request gets its token.
            order = sorted(left, key=lambda i: (not outputs[i], i))
            sampled = self.step(prompts, outputs, num_computed, order)
            for i, token in sampled.items():
                outputs[i].append(token)
                if len(outputs[i]) == num_outputs[i]:
                    left.discard(i)
                    c.llama_memory_seq_rm(c.llama_get_memory(self.context), i, -1, -1)
        return outputs

    def step(
        self, prompts: list[list[int]], outputs: list[list[int]], num_computed: list[int], order: list[int]
    ) -> dict[int, int]:
        """Fill one batch, decode it, and choose the best token of each sequence that has ended."""
        batch, n, ends = self.batch, 0, {}
        for i in order:
            tokens = [outputs[i][-1]] if outputs[i] else prompts[i][num_computed[i] :]
            for token in tokens[: BATCH - n]:
                batch.token[n], batch.pos[n] = token, num_computed[i]
                batch.n_seq_id[n], batch.seq_id[n][0], batch.logits[n] = 1, i, 0
                num_computed[i] += 1
                n += 1
            if num_computed[i] == len(prompts[i]) + len(outputs[i]):
                ends[i] = n - 1
                batch.logits[n - 1] = 1
            if n == BATCH:
                break
        batch.n_tokens = n
        if code := c.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode answered {code}")
        return {i: self.best(row) for i, row in ends.items()}

    def best(self, row: int) -> int:
        logits = c.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
