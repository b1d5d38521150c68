"""KV cache of committed rows. It owns the position: a row comes in by `commit` only, so a rejected row never lands.

Legend: P past rows, T new rows, kv key/value heads, D head_dim, W window, g query heads per kv head.
"""

import numpy as np

from .manifest import FULL, SLIDING, KVSpec

Array = np.ndarray
MASKED = np.float32(-1e9)


class KVCache:
    """Token-major float32 rows [P, kv, D] of every layer that owns KV. Sliding layers keep a ring of exactly W rows
    (slot = position mod W), full layers a row per position; a prefix of a buffer is what a graph reads."""

    def __init__(self, spec: KVSpec, group: int, max_context_tokens: int):
        self.spec, self.group, self.max_context_tokens = spec, group, max_context_tokens
        self.length = 0  # committed rows; the next row's position
        self._positions = np.full(spec.window, -1)  # of each ring slot
        self._buffers = {layer.layer: self._allocate(layer) for layer in spec.layers}
        self._full_mask = np.zeros((1, max_context_tokens), np.float32)

    def _allocate(self, layer) -> tuple[Array, Array]:
        """k and v; np.zeros maps the pages, only rows written become resident"""
        rows = self.spec.window if layer.type == SLIDING else self.max_context_tokens
        return tuple(np.zeros((rows, layer.kv_heads, layer.head_dim), np.float32) for _ in "kv")

    def past_rows(self, kind: str) -> int:
        """P: at least 1, a dead row that the masks hide before the first commit."""
        return max(1, min(self.length, self.spec.window) if kind == SLIDING else self.length)

    def past(self, layer: int, kind: str) -> tuple[Array, Array]:
        """k, v [P, kv, D]: views, no copies."""
        k, v = self._buffers[layer]
        rows = self.past_rows(kind)
        return k[:rows], v[:rows]

    def donor_rows(self, kind: str) -> tuple[Array, Array]:
        """k, v [P, kv, D] that the KV-shared layers and the drafter read."""
        return self.past(self.spec.donors[kind], kind)

    def masks(self, rows: int) -> dict[str, Array]:
        """Additive masks for T = rows new tokens: mask_sliding [T * g, P], mask_full [1, P], mask_new [T * g, T]."""
        query = self.length + np.arange(rows)[:, None]
        key = self._positions[: self.past_rows(SLIDING)]
        sliding = np.where((key >= 0) & (query - key < self.spec.window), np.float32(0), MASKED)
        new = np.where(np.tri(rows, dtype=bool), np.float32(0), MASKED)  # T <= W: the window hides no new row
        full = self._full_mask[:, : self.length] if self.length else np.full((1, 1), MASKED)
        return {
            "mask_sliding": np.repeat(sliding, self.group, 0),
            f"mask_{FULL}": full,
            "mask_new": np.repeat(new, self.group, 0),
        }

    def commit(self, new_k: list[Array], new_v: list[Array], rows: int) -> None:
        """Append the first `rows` of the new rows [T, kv, D] of every layer, in the order of the spec."""
        if self.length + rows > self.max_context_tokens:
            raise ValueError(f"context is full: {self.length} + {rows} rows of {self.max_context_tokens}")
        start, window = self.length % self.spec.window, self.spec.window
        tail = min(rows, window - start)  # before the ring wraps
        for layer, k, v in zip(self.spec.layers, new_k, new_v, strict=True):
            for buffer, new in zip(self._buffers[layer.layer], (k, v), strict=True):
                if layer.type == FULL:
                    buffer[self.length : self.length + rows] = new[:rows]
                else:
                    buffer[start : start + tail] = new[:tail]
                    buffer[: rows - tail] = new[tail:rows]
        positions = np.arange(self.length, self.length + rows)
        self._positions[positions % window] = positions
        self.length += rows
