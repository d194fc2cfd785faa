"""Products with weights packed for oneDNN, the library that torch uses on a CPU.

A packed weight is stored in the order in which the product reads it. The operators are private ones
of torch, used only here; where they are missing, `Linear` is F.linear.
"""

import os

import torch
import torch.nn.functional as F
from torch import Tensor

# For each shape oneDNN makes code and memory of its own, up to a megabyte, and keeps 1,024 of them: a
# server's steps have any number of rows, and its memory grows by hundreds of megabytes. Making them
# anew takes a few milliseconds for a number of rows that was not seen of late. Read at the first product.
for _cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "64")

# The number of rows that the packing is tuned for. This one was the fastest, or nearly so, from 1 row
# to 512.
ROWS = 32


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether weights of this type can be packed on this machine."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class Linear:
    """x (N, in_features) to x @ weight.T + bias, (N, out_features)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.packed = can_pack(weight.dtype)
        self.bias = bias
        self.in_features, self.dtype = weight.shape[1], weight.dtype
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out

    def sums(self) -> Tensor:
        """Return the sum of each row of the weight, plus the bias: NaN where one of them is NaN. A packed
        weight cannot be read."""
        return self(torch.ones(1, self.in_features, dtype=self.dtype))
