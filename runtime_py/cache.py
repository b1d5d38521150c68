"""KV cache of committed rows. It owns the position: a row comes in by `commit` only, so a rejected row never lands.

The text is cut into chunks of C positions. Rows of closed chunks are the past, the open chunk is the tail: a token sees
every key at the same place of the same sum, alone or in a block, as long as no call crosses a chunk's end (`room`).

Legend: P past rows, T new rows, C rows of a chunk, kv key/value heads, D head_dim, W window, g query heads per kv head.
"""

from dataclasses import dataclass

import numpy as np

from .manifest import FULL, SLIDING, KVLayerSpec, KVSpec

Array = np.ndarray
MASKED = np.float32(-1e9)


@dataclass(frozen=True)
class Layout:
    """Where the rows of a call stand. masks: additive, a row per (token, query head of a group): mask_past_sliding
    [T * g, P], mask_tail_sliding and mask_tail_full [T * g, C]. shared: mask_past_full [1, P]; place [C, T], 1 at the
    slot of each new row."""

    masks: dict[str, Array]
    shared: dict[str, Array]


class KVCache:
    """Token-major float32 rows [rows, kv, D] of every layer that owns KV. Full layers keep a row per position, so that
    past and tail are views of one buffer. Sliding layers keep a ring of the last W rows of closed chunks (slot = position
    mod W) and the open chunk; the sliding donor also a ring of the last W rows of all, which the drafter reads. Tail rows
    from the position on are zero."""

    def __init__(self, spec: KVSpec, group: int, max_context_tokens: int):
        self.spec, self.group, self.max_context_tokens = spec, group, max_context_tokens
        self.length = 0  # committed rows; the next row's position
        self._past = {layer.layer: self._zeros(layer, self._past_capacity(layer.type)) for layer in spec.layers}
        self._tail = {
            layer.layer: self._zeros(layer, spec.chunk_rows) for layer in spec.layers if layer.type == SLIDING
        }
        donor = next(layer for layer in spec.layers if layer.layer == spec.donors[SLIDING])
        self._donor_ring = self._zeros(donor, spec.window)
        self._positions = np.full(spec.window, -1)  # of each ring slot
        self._full_mask = np.zeros((1, max_context_tokens), np.float32)

    def _past_capacity(self, kind: str) -> int:
        chunk = self.spec.chunk_rows
        return self.spec.window if kind == SLIDING else -(-self.max_context_tokens // chunk) * chunk

    @staticmethod
    def _zeros(layer: KVLayerSpec, rows: int) -> tuple[Array, Array]:
        """k and v; np.zeros maps the pages, only rows written become resident"""
        return tuple(np.zeros((rows, layer.kv_heads, layer.head_dim), np.float32) for _ in "kv")

    @property
    def start(self) -> int:
        """First position of the open chunk."""
        return self.length - self.length % self.spec.chunk_rows

    @property
    def room(self) -> int:
        """Rows that the open chunk still takes, at least 1: the most tokens of one call."""
        return self.spec.chunk_rows - self.length % self.spec.chunk_rows

    def past(self, layer: int, kind: str) -> tuple[Array, Array]:
        """k, v [P, kv, D] of closed chunks: views. P is at least 1, a dead row that the masks hide before the first."""
        rows = max(1, min(self.start, self.spec.window) if kind == SLIDING else self.start)
        k, v = self._past[layer]
        return k[:rows], v[:rows]

    def tail(self, layer: int, kind: str) -> tuple[Array, Array]:
        """k, v [C, kv, D] of the open chunk: views; zero from the position on."""
        if kind == SLIDING:
            return self._tail[layer]
        k, v = self._past[layer]
        rows = slice(self.start, self.start + self.spec.chunk_rows)
        return k[rows], v[rows]

    def donor_rows(self, kind: str) -> tuple[Array, Array]:
        """k, v [P, kv, D] of all committed rows of the donor that a type's drafter layers read: views."""
        k, v = self._donor_ring if kind == SLIDING else self._past[self.spec.donors[FULL]]
        rows = max(1, min(self.length, self.spec.window) if kind == SLIDING else self.length)
        return k[:rows], v[:rows]

    def layout(self, rows: int) -> Layout:
        """For T = rows new tokens, at most `room`."""
        assert 1 <= rows <= self.room
        window, query = self.spec.window, self.length + np.arange(rows)[:, None]
        past = self._positions[: max(1, min(self.start, window))]
        tail = self.start + np.arange(self.spec.chunk_rows)
        seen = {
            "mask_past_sliding": (past >= 0) & (query - past < window),
            "mask_tail_sliding": (tail <= query) & (query - tail < window),
            "mask_tail_full": tail <= query,
        }
        masks = {name: np.repeat(np.where(rule, np.float32(0), MASKED), self.group, 0) for name, rule in seen.items()}
        past_full = self._full_mask[:, : self.start] if self.start else np.full((1, 1), MASKED)
        place = (tail[:, None] == query.T).astype(np.float32)
        return Layout(masks, {"mask_past_full": past_full, "place": place})

    def commit(self, new_k: list[Array], new_v: list[Array], rows: int) -> None:
        """Append the first `rows` of the new rows [T, kv, D] of every layer, in the order of the spec."""
        if self.length + rows > self.max_context_tokens:
            raise ValueError(f"context is full: {self.length} + {rows} rows of {self.max_context_tokens}")
        assert rows <= self.room
        first = self.length - self.start
        for layer, *new in zip(self.spec.layers, new_k, new_v, strict=True):
            for buffer, values in zip(self.tail(layer.layer, layer.type), new, strict=True):
                buffer[first : first + rows] = values[:rows]
        donor = self.spec.donors[SLIDING]
        for ring, values in zip(self._donor_ring, (new_k[donor], new_v[donor]), strict=True):
            _write_ring(ring, values[:rows], self.length)
        if rows == self.room:
            self._close_chunk()
        self.length += rows

    def _close_chunk(self) -> None:
        """The open chunk of the sliding layers joins the past."""
        for layer, parts in self._tail.items():
            for ring, values in zip(self._past[layer], parts, strict=True):
                _write_ring(ring, values, self.start)
                values[:] = 0
        positions = np.arange(self.start, self.start + self.spec.chunk_rows)
        _write_ring(self._positions, positions, self.start)


def _write_ring(ring: Array, rows: Array, position: int) -> None:
    """rows of the positions from `position` on, each to slot position mod W; of more than W the last W stay."""
    window = len(ring)
    position, rows = position + max(0, len(rows) - window), rows[-window:]
    slot = position % window
    before = min(len(rows), window - slot)  # until the ring wraps
    ring[slot : slot + before] = rows[:before]
    ring[: len(rows) - before] = rows[before:]
