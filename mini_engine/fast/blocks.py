"""Products with weights of 4 or 8 bits, by kernels.cpp: fewer bytes to read for each token.

A weight is cut into blocks of 32 columns, each with a scale and a least value of its own, as llama.cpp's
Q4_1 (and Q8_0, whose least value follows from the scale). A file of these types is kept as it is. Other
weights are rounded to the nearest step. x is rounded to 16 bits, each block of 32 by its largest number, so
that integers are multiplied.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.fast.kernels import Kernels
from mini_engine.fast.panels import PANEL

BLOCK = 32  # columns


class Linear:
    """x (N, in_features) to x @ weight.T + bias, (N, out_features), in float32; the weight in `bits` bits,
    4 or 8, and 64 bits a block. A row's result does not depend on the other rows."""

    def __init__(self, kernels: Kernels, bits: int, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bits, self.bias = bits, bias
        self.out_features, self.in_features = weight.shape
        self.missing = -self.in_features % BLOCK  # columns of zeros are added
        padded = F.pad(weight.float(), (0, self.missing, 0, -self.out_features % PANEL))
        rows = padded.view(-1, PANEL, padded.shape[1] // BLOCK, BLOCK)
        least, scale = _steps(rows, bits)
        numbers = torch.where(scale > 0, (rows - least) / scale, 0).round().clamp_(0, 2**bits - 1)
        pairs = torch.stack((scale, least)).squeeze(-1).permute(1, 3, 0, 2)
        self.steps = kernels.room(*pairs.shape).copy_(pairs)  # (panels, blocks, 2, PANEL)
        columns = numbers.to(torch.int32).view(*rows.shape[:3], bits, 32 // bits)
        words = (columns << self._shifts()).sum(-1, dtype=torch.int32)
        words = words.permute(0, 2, 3, 1)
        self.words = (
            kernels.room(*words.shape).view(torch.int32).copy_(words)
        )  # (panels, blocks, bits, PANEL)
        self.product = kernels.linear_blocks[bits]
        added = None if bias is None else bias.data_ptr()
        self.pointers = self.words.data_ptr(), self.steps.data_ptr(), added

    def __call__(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, self.missing)) if self.missing else x
        out = x.new_empty(x.shape[0], self.out_features)
        self.product(padded.data_ptr(), *self.pointers, out.data_ptr(), *padded.shape, self.out_features)
        return out

    def weight(self) -> Tensor:
        """Return the weight (out_features, in_features) that these numbers stand for."""
        numbers = (self.words.unsqueeze(-1) >> self._shifts()) & (2**self.bits - 1)
        scale, least = self.steps.unsqueeze(-2).unsqueeze(-1).unbind(2)  # (panels, blocks, 1, PANEL, 1)
        rows: Tensor = numbers * scale + least
        rows = rows.permute(0, 3, 1, 2, 4).reshape(-1, self.in_features + self.missing)
        return rows[: self.out_features, : self.in_features]

    def _shifts(self) -> Tensor:
        """Return the place of each column in its word (32 / bits,): two columns in the halves, the next two
        above them."""
        places = torch.arange(0, 16, self.bits, dtype=torch.int32)
        return places.unsqueeze(1).add(torch.tensor([0, 16])).flatten()

    def sums(self) -> Tensor:
        """Return the sum of each row of the weight, plus the bias: NaN where one of them is NaN."""
        return self(torch.ones(1, self.in_features))


def _steps(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return least value and scale of each block (..., 1): with 4 bits from the smallest to the largest
    number, with 8 bits the same on both sides of zero."""
    if bits == 4:
        least, most = rows.aminmax(dim=-1, keepdim=True)
        return least, (most - least) / 15
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return -128 * scale, scale
