"""Products in bfloat16 by kernels.cpp, for a processor that has no instructions for it.

There torch takes 20 times as long for 32 rows as for one. Here the bytes of a weight are read once for
six rows and widened to float32 in registers. A row's result does not depend on the other rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.fast.kernels import Kernels

PANEL = 16  # outputs


class Linear:
    """x (N, in_features) to x @ weight.T + bias, (N, out_features), all of bfloat16; summed in float32."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None = None) -> None:
        self.kernels, self.bias = kernels, bias
        self.out_features, self.in_features = weight.shape
        self.odd = self.in_features % 2  # a column of zeros is added
        padded = F.pad(weight, (0, self.odd, 0, -self.out_features % PANEL))
        pairs = padded.view(-1, PANEL, padded.shape[1] // 2, 2)
        self.panels = pairs.transpose(1, 2).contiguous()  # (panels, pairs of columns, PANEL, 2)

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.linear(
            F.pad(x, (0, self.odd)) if self.odd else x, self.panels, self.bias, self.out_features
        )

    def sums(self) -> Tensor:
        """Return the sum of each row of the weight, plus the bias: NaN where one of them is NaN."""
        return self(torch.ones(1, self.in_features, dtype=torch.bfloat16))
