"""kernels.cpp from Python: built once with `mini-engine kernels build`, kept in the user's cache.

Nothing is built at import. Where the kernels are missing, torch's operators do the same (steps.py,
attention.py).
"""

import ctypes
import hashlib
import math
import mmap
import os
import platform
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mini_engine.attention import KVPool
from mini_engine.batch import Batch
from mini_engine.loading.registry import cache_dir

SOURCE = Path(__file__).with_name("kernels.cpp")
# Fast math only while compiling: the linker would make the whole process round tiny numbers to zero. The
# order of sums is the code's, so that a row's result does not depend on the rows beside it.
COMPILE = ["-c", "-std=c++17", "-O3", "-ffast-math", "-fno-associative-math", "-fPIC", "-fopenmp"]
LINK = ["-shared", "-fopenmp"]
Norms = tuple[Tensor | None, Tensor | None]  # weights (head_dim,) of a layer's norms of q's and k's heads
ROOM = 2**24  # numbers of 4 bytes that memory is asked for at a time
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}


class BuildError(RuntimeError):
    """The kernels could not be built; the message says why and what to do."""


def library() -> Path:
    """Return the path of the built kernels: a file for each source and each kind of processor."""
    cpu = Path("/proc/cpuinfo")
    flags = re.search("^(?:flags|Features).*$", cpu.read_text(), re.MULTILINE) if cpu.is_file() else None
    kind = f"{platform.machine()} {COMPILE} {flags and flags[0]}"
    digest = hashlib.sha256(SOURCE.read_bytes() + kind.encode()).hexdigest()[:16]
    return cache_dir() / f"kernels-{digest}.so"


def build() -> Path:
    """Build the kernels for this machine, unless they are built, and return their path. Takes seconds.
    Raises BuildError."""
    path = library()
    if path.is_file():
        return path
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None:
        raise BuildError("no C++ compiler found; install g++ or clang++, or name yours in CXX")
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        _run([compiler, *COMPILE, native, str(SOURCE), "-o", str(made[0])])
        _run([compiler, str(made[0]), *LINK, "-o", str(made[1])])
        made[1].replace(path)
    return path


def _run(line: list[str]) -> None:
    try:
        done = subprocess.run(line, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{line[0]} cannot be run ({error}); name a C++ compiler in CXX") from None
    if done.returncode:
        raise BuildError(f"{' '.join(line)}\nfailed with:\n{done.stderr.strip()}")


def load(dtype: torch.dtype) -> "Kernels | None":
    """Return the kernels for this type, or None where they are not built or do not load."""
    if dtype not in NAMES or not (path := library()).is_file():
        return None
    try:
        return Kernels(path, dtype)
    except (OSError, AttributeError) as error:
        warnings.warn(f"{path} does not load ({error}); delete it and build it again", stacklevel=2)
        return None


def _large_pages(num: int) -> Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num)
    memory = mmap.mmap(-1, 4 * num, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system may be built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)


class _Step(ctypes.Structure):
    """kernels.cpp's Step, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tiles", "members", "positions", "slots", "tables")),
        *(
            (name, ctypes.c_int64)
            for name in ("rows", "num_tiles", "table_stride", "heads", "kv_heads", "head_dim", "block_size")
        ),
        ("eps", ctypes.c_double),
    ]


class Kernels:
    """The functions of kernels.cpp for one data type. They take tensors on the CPU with contiguous rows;
    the rows of q, k and v may be a stride apart."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        lib, name = ctypes.CDLL(str(path)), NAMES[dtype]
        p, n = ctypes.c_void_p, ctypes.c_int64

        def function(stem: str, *types: Any, name: str = name) -> Any:
            found = getattr(lib, f"{stem}_{name}")
            found.argtypes, found.restype = types, None
            return found

        self.attend = function("attend", ctypes.POINTER(_Step), p, p, p, n, *[p] * 7)
        self._add_rms_norm = function("add_rms_norm", p, p, p, p, n, n, ctypes.c_double)
        self._silu_mul = function("silu_mul", p, p, n, n)
        self._linear = function("linear", p, p, p, p, n, n, n) if dtype != torch.float64 else None
        self._room = torch.empty(0)  # what is left of the last large pages
        self._to_panels = lib.to_panels
        self._to_panels.argtypes, self._to_panels.restype = (p, p, n, n), None
        # Of x (N, columns), words (P, columns / 32, bits, 16), steps (P, columns / 32, 2, 16), bias or None,
        # and out (N, outputs): see blocks.py.
        self.linear_blocks = {
            bits: function("linear", p, p, p, p, p, n, n, n, name=f"{bits}bit") for bits in (4, 8)
        }

    def room(self, *shape: int) -> Tensor:
        """Return memory for weights, a tensor of this shape in float32, in large pages where the system has
        them: a step of few rows reads all weights, and finding small pages takes a tenth of its time."""
        if self._room.numel() < (size := math.prod(shape)):
            self._room = _large_pages(max(size, ROOM))
        taken, self._room = self._room[:size], self._room[size:]
        return taken.view(shape)

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add delta to x, in place, and return the norm of the sum; all (N, size)."""
        out = torch.empty_like(x)
        added = None if delta is None else delta.data_ptr()
        self._add_rms_norm(x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), *x.shape, eps)
        return out

    def to_panels(self, weight: Tensor) -> Tensor:
        """Return the weight (16 * P, words) in panels (P, words, 16), of words of 4 bytes."""
        out = self.room(weight.shape[0] // 16, weight.shape[1], 16)
        self._to_panels(weight.data_ptr(), out.data_ptr(), *out.shape[:2])
        return out

    def linear(self, x: Tensor, panels: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """Return x @ weight.T + bias (N, outputs), of x (N, columns) and the weight's panels (P, words, 16):
        a word is a float32, or two of bfloat16."""
        assert self._linear is not None, "float64 is not kept in panels"
        out = x.new_empty(len(x), outputs)
        wide = x.float()
        added = None if bias is None else bias.data_ptr()
        self._linear(wide.data_ptr(), panels.data_ptr(), added, out.data_ptr(), *wide.shape, outputs)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up (N, size) of gate and up in one tensor (N, 2 * size)."""
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size)
        return out


class PagedAttend:
    """Attention of one step over the pool, an interfaces.Attend. `tiles` (T, 4) are the pieces of work, and
    `members` (M, 2) the rows of those that share blocks: see attention.py's `tiles`. The result of a layer is
    overwritten by the next."""

    def __init__(
        self,
        kernels: Kernels,
        batch: Batch,
        work: tuple[Tensor, Tensor],
        pool: KVPool,
        heads: int,
        eps: float,
    ) -> None:
        self.kept = batch, work, pool  # what the addresses below point into
        self.attend, self.heads = kernels.attend, heads
        (rows,), (self.kv_heads, self.dim) = batch.positions.shape, pool.k.shape[3:]
        self.bytes = pool.k.itemsize
        self.k, self.v = pool.k.data_ptr(), pool.v.data_ptr()
        self.layer_bytes = pool.k[0].numel() * self.bytes
        self.out = pool.k.new_empty(rows, heads, self.dim)
        given = (*work, batch.positions, batch.slot_mapping, batch.block_tables)
        sizes = rows, len(work[0]), batch.block_tables.stride(0), heads, self.kv_heads, self.dim
        self.step = _Step(*(tensor.data_ptr() for tensor in given), *sizes, batch.block_size, eps)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at, apart = layer * self.layer_bytes, (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0))
        self.attend(self.step, *apart, *[None] * 4, self.k + at, self.v + at, self.out.data_ptr())
        return self.out

    def of_qkv(self, norms: Sequence[Norms], cos: Tensor, sin: Tensor) -> Callable[[int, Tensor], Tensor]:
        """Return a function of a layer and its q, k and v in a row, qkv (N, heads of all * head_dim), that
        returns attention (N, heads * head_dim), and changes qkv: it does the norms of the heads, where a
        layer has them, and RoPE by cos and sin (N, head_dim / 2)."""
        # The function is called in every layer, so whatever it can find ready is here.
        attend, step, out = self.attend, self.step, self.out.flatten(1)
        k_cache, v_cache, layer_bytes, result = self.k, self.v, self.layer_bytes, out.data_ptr()
        width = (self.heads + 2 * self.kv_heads) * self.dim
        to_k, to_v = (n * self.dim * self.bytes for n in (self.heads, self.heads + self.kv_heads))
        angles = cos.data_ptr(), sin.data_ptr()
        weights = [tuple(None if w is None else w.data_ptr() for w in pair) for pair in norms]

        def attention(layer: int, qkv: Tensor) -> Tensor:
            q, at = qkv.data_ptr(), layer * layer_bytes
            given = q, q + to_k, q + to_v, width, *weights[layer], *angles
            attend(step, *given, k_cache + at, v_cache + at, result)
            return out

        return attention
