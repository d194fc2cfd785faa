"""kernels.cpp from Python: built once with `mini-engine kernels build`, kept in the user's cache.

Nothing is built at import. Where the kernels are missing, torch's operators do the same (steps.py,
attention.py).
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mini_engine.batch import Batch
from mini_engine.loading.registry import cache_dir

SOURCE = Path(__file__).with_name("kernels.cpp")
# Fast math only while compiling: the linker would make the whole process round tiny numbers to zero.
COMPILE = ["-c", "-std=c++17", "-O3", "-ffast-math", "-fPIC", "-fopenmp"]
LINK = ["-shared", "-fopenmp"]
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


class _Attention(ctypes.Structure):
    """kernels.cpp's Attention, field by field."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache", "out", "tiles", "positions", "tables")),
        *(
            (name, ctypes.c_int64)
            for name in ("num_tiles", "table_stride", "heads", "kv_heads", "head_dim", "block_size")
        ),
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

        self._attend = function("attend", ctypes.POINTER(_Attention))
        self._add_rms_norm = function("add_rms_norm", p, p, p, p, n, n, ctypes.c_double)
        self._rope = function("rope", p, n, p, p, n, n, n)
        self._silu_mul = function("silu_mul", p, p, n, n)
        self._write_kv = function("write_kv", p, p, n, p, p, p, n, n)
        self._linear = function("linear", p, p, p, p, n, n, n) if dtype == torch.bfloat16 else None
        self._linear_blocks = {
            bits: function("linear", p, p, p, p, p, n, n, n, name=f"{bits}bit") for bits in (4, 8)
        }

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add delta to x, in place, and return the norm of the sum; all (N, size)."""
        out = torch.empty_like(x)
        added = None if delta is None else delta.data_ptr()
        self._add_rms_norm(x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), *x.shape, eps)
        return out

    def linear(self, x: Tensor, panels: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """Return x @ weight.T + bias (N, outputs) in bfloat16, of x (N, columns) and the weight's panels
        (P, columns / 2, 16, 2)."""
        assert self._linear is not None, "only bfloat16 is kept in panels"
        out = x.new_empty(len(x), outputs)
        wide = x.float()
        added = None if bias is None else bias.data_ptr()
        self._linear(wide.data_ptr(), panels.data_ptr(), added, out.data_ptr(), *wide.shape, outputs)
        return out

    def linear_blocks(
        self, bits: int, x: Tensor, words: Tensor, steps: Tensor, bias: Tensor | None, outputs: int
    ) -> Tensor:
        """Return x @ weight.T + bias (N, outputs) in float32, of x (N, columns) and a weight of `bits` bits
        in blocks of 32: words (P, columns / 32, bits, 16) and steps (P, columns / 32, 2, 16)."""
        out = x.new_empty(len(x), outputs)
        weight = words.data_ptr(), steps.data_ptr(), None if bias is None else bias.data_ptr()
        self._linear_blocks[bits](x.data_ptr(), *weight, out.data_ptr(), *x.shape, outputs)
        return out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate x (N, heads, head_dim) in place; cos and sin are (N, head_dim / 2)."""
        rows, heads, dim = x.shape
        self._rope(x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), rows, heads, dim // 2)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up (N, size) of gate and up in one tensor (N, 2 * size)."""
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size)
        return out

    def write_kv(self, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Do what attention.py's `write_kv` does."""
        rows, kv_heads, dim = k.shape
        caches = k_cache.data_ptr(), v_cache.data_ptr()
        self._write_kv(
            k.data_ptr(), v.data_ptr(), k.stride(0), *caches, slots.data_ptr(), rows, kv_heads * dim
        )

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, tiles: Tensor) -> Tensor:
        """Do what attention.py's `paged_attention` does. `tiles` (T, 3) are the pieces of work: a request,
        its first row and its end row."""
        out = torch.empty(q.shape, dtype=q.dtype)
        rows, heads, dim = q.shape
        work = _Attention(
            q.data_ptr(),
            q.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            out.data_ptr(),
            tiles.data_ptr(),
            batch.positions.data_ptr(),
            batch.block_tables.data_ptr(),
            len(tiles),
            batch.block_tables.stride(0),
            heads,
            k_cache.shape[2],
            dim,
            batch.block_size,
        )
        self._attend(work)
        return out
