"""Products by kernels.cpp: float32, and bfloat16 on a processor that has no instructions for it.

There torch takes 20 times as long for 32 rows of bfloat16 as for one. Here the bytes of a weight are read
once for six rows, and those of bfloat16 widened in registers. A row's result does not depend on the others.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.fast.kernels import Kernels

PANEL = 16  # outputs


def are_faster() -> bool:
    """Return whether float32 in panels is faster than oneDNN on this processor: measured with AVX2, where
    the kernels use all of its registers, and not with AVX-512, where they use half of each."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


class Linear:
    """x (N, in_features) to x @ weight.T + bias, (N, out_features), of the weight's type, summed in
    float32."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None = None) -> None:
        self.kernels, self.bias = kernels, bias
        self.out_features, self.in_features = weight.shape
        self.dtype, columns = weight.dtype, 4 // weight.itemsize  # columns in a word
        self.odd = self.in_features % columns  # a column of zeros is added
        missing = -self.out_features % PANEL
        if self.odd or missing:  # F.pad copies in any case
            weight = F.pad(weight, (0, self.odd, 0, missing))
        self.panels = kernels.to_panels(weight.contiguous().view(torch.float32))

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.linear(
            F.pad(x, (0, self.odd)) if self.odd else x, self.panels, self.bias, self.out_features
        )

    def sums(self) -> Tensor:
        """Return the sum of each row of the weight, plus the bias: NaN where one of them is NaN."""
        return self(torch.ones(1, self.in_features, dtype=self.dtype))
