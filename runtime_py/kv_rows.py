"""Float32 KV rows -> committed rows of a cache's dtype. Every row by itself, so that it has the same bits whenever and with
whatever other rows it is made.

Legend: T rows, kv key/value heads, D head_dim.
"""

import numpy as np

Array = np.ndarray
INT8_MAX = np.float32(127)


def encode(k: Array, v: Array, dtype: str) -> tuple[Array, ...]:
    """k, v float32 [T, kv, D] -> the KV_PARTS of the dtype: k, v; of int8 also k_scale, v_scale float32 [T, kv].

    float16 holds what heads make: keys and values come from an RMS norm, far below its largest number.
    """
    if dtype == "int8":
        (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
        return k, v, k_scale, v_scale
    return k.astype(dtype, copy=False), v.astype(dtype, copy=False)


def quantize(rows: Array) -> tuple[Array, Array]:
    """float32 [T, kv, D] -> int8 in -127..127, float32 scales [T, kv]: row = int8 * scale, halves rounded to even. A row
    of zeros has scale 0."""
    scale = np.abs(rows).max(-1) / INT8_MAX
    values = np.rint(rows / np.where(scale > 0, scale, 1)[..., None])
    return np.clip(values, -INT8_MAX, INT8_MAX).astype(np.int8), scale  # clip: a subnormal scale is too coarse
