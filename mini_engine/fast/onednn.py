"""Products with weights packed for oneDNN, the library below torch's own on a CPU.

A packed weight lies in the order in which the product reads it. The operators are torch's private
ones, and all of them are used here; where they are missing, `Linear` is F.linear.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# The number of rows that the packing is tuned for. One packing serves them all: this one was the
# quickest, or nearly so, from 1 row to 512.
ROWS = 32


def can_pack(dtype: torch.dtype) -> bool:
    """Whether weights of this type can be packed on this machine."""
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
        """The sum of each row of the weight, and the bias: what is NaN in them is NaN here. A packed weight
        cannot be looked at."""
        return self(torch.ones(1, self.in_features, dtype=self.dtype))
