"""Values of quantized weights: of SmolLM2's types in few passes over memory, of others by the package `gguf`.

The package makes the same numbers, bit for bit, but takes twice as long for these two types.
"""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

BLOCK = 32  # values, which share a scale


def values_of(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Return the values, flat, of whole blocks of bytes (flat). Raises NotImplementedError for a type that
    the package does not know."""
    if kind not in (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
        return dequantize(raw, kind)
    blocks = raw.reshape(-1, GGML_QUANT_SIZES[kind][1])
    values = np.empty((len(blocks), BLOCK), np.float32)
    scale = blocks[:, :2].view(np.float16).astype(np.float32)
    if kind == GGMLQuantizationType.Q8_0:
        np.multiply(blocks[:, 2:].view(np.int8), scale, out=values)
    else:
        numbers = blocks[:, 4:]  # the first half of the values in the lower bits of the bytes
        values[:, : BLOCK // 2], values[:, BLOCK // 2 :] = numbers & 15, numbers >> 4
        values *= scale
        values += blocks[:, 2:4].view(np.float16).astype(np.float32)
    return values.reshape(-1)
