"""The small steps between two products, with torch's operators; kernels.py does each in one pass."""

import torch
import torch.nn.functional as F
from torch import Tensor


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add delta to x, in place, and return the norm of the sum; all (N, size)."""
    if delta is not None:
        x += delta
    return F.rms_norm(x, weight.shape, weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x (N, heads, head_dim) in place; cos and sin are (N, head_dim / 2)."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.mul(low, cos).addcmul_(high, sin, value=-1)
    high.copy_(torch.mul(high, cos).addcmul_(low, sin))
    low.copy_(turned)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up (N, size) of gate and up in one tensor (N, 2 * size)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
