"""KV cache of committed rows. It owns the position: a row comes in by `commit` only, so a rejected row never lands.

The text is cut into chunks of C positions. Rows of closed chunks are the past, the open chunk is the tail: a token sees
every key at the same place of the same sum, alone or in a block, as long as no call crosses a chunk's end (`room`).
Rows go by `rewind`: within the open chunk always, further back as far as the rows that the windows need are still held.

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
    from the position on are zero. margin_rows: with more than 0, a second ring of the last W + margin_rows rows of closed
    chunks, so that `rewind` reaches back that far behind the open chunk."""

    def __init__(self, spec: KVSpec, group: int, max_context_tokens: int, margin_rows: int = 0):
        self.spec, self.group, self.max_context_tokens = spec, group, max_context_tokens
        self.length = 0  # committed rows; the next row's position
        self._floor = 0  # a rewind leaves holes below it in the rings of closed chunks
        self._past = {layer.layer: self._zeros(layer, self._past_capacity(layer.type)) for layer in spec.layers}
        self._tail = {
            layer.layer: self._zeros(layer, spec.chunk_rows) for layer in spec.layers if layer.type == SLIDING
        }
        self._closed = {
            layer.layer: self._zeros(layer, spec.window + margin_rows) if margin_rows else self._past[layer.layer]
            for layer in spec.layers
            if layer.type == SLIDING
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
            for ring, closed, values in zip(self._past[layer], self._closed[layer], parts, strict=True):
                _write_ring(ring, values, self.start)
                if closed is not ring:
                    _write_ring(closed, values, self.start)
                values[:] = 0
        positions = np.arange(self.start, self.start + self.spec.chunk_rows)
        _write_ring(self._positions, positions, self.start)

    def _oldest(self) -> int:
        """The first position of which the sliding layers' rows are held."""
        return max(self._floor, self.start - len(next(iter(self._closed.values()))[0]))

    def _needed(self, length: int) -> int:
        """The first position whose sliding rows a cache of `length` rows has."""
        return max(0, length - length % self.spec.chunk_rows - self.spec.window)

    def holds(self, length: int) -> bool:
        """Whether `rewind(length)` can be exact."""
        in_open_chunk = self.start <= length <= self.length
        return in_open_chunk or length == 0 or (0 < length < self.length and self._needed(length) >= self._oldest())

    def rewind(self, length: int) -> None:
        """Forget the rows from `length` on: the cache is, bit for bit, what it was. ValueError if it holds too little."""
        if not self.holds(length):
            raise ValueError(f"the cache of {self.length} rows cannot be rewound to {length}; run the text again")
        if length == self.length:
            return
        first, floor = self._needed(length), self._oldest()
        rows = {layer: self._sliding_rows(layer, first, length) for layer in self._tail}
        for layer in self.spec.layers:
            if layer.type == FULL:
                for buffer in self._past[layer.layer]:
                    buffer[length : self.length] = 0
        self.length, self._floor = length, floor if length else 0
        self._rebuild(rows, first)

    def _sliding_rows(self, layer: int, first: int, end: int) -> tuple[Array, Array]:
        """Copies of k, v [end - first, kv, D] of the positions from `first` on."""
        closed = np.arange(first, max(first, min(end, self.start))) % len(self._closed[layer][0])
        open_rows = slice(max(0, first - self.start), max(0, end - self.start))
        return tuple(
            np.concatenate([ring[closed], tail[open_rows]])
            for ring, tail in zip(self._closed[layer], self._tail[layer], strict=True)
        )

    def _rebuild(self, rows: dict[int, tuple[Array, Array]], first: int) -> None:
        """Rings of W rows and open chunks from the sliding rows of the positions first..length - 1 of each layer."""
        closed = self.start - first
        for layer, parts in rows.items():
            for ring, tail, values in zip(self._past[layer], self._tail[layer], parts, strict=True):
                _fill_ring(ring, values[:closed], first)
                tail[: self.length - self.start], tail[self.length - self.start :] = values[closed:], 0
        for ring, values in zip(self._donor_ring, rows[self.spec.donors[SLIDING]], strict=True):
            _fill_ring(ring, values, first)
        self._positions[:] = -1
        _write_ring(self._positions, np.arange(first, self.start), first)

    def rows(self) -> tuple[int, dict[str, Array]]:
        """What is held, for a file: the position of the first sliding row, and k.i, v.i [rows, kv, D] of each layer, of
        every position for full layers."""
        first, found = self._oldest(), {}
        for layer in self.spec.layers:
            full = (buffer[: self.length] for buffer in self._past[layer.layer])
            parts = full if layer.type == FULL else self._sliding_rows(layer.layer, first, self.length)
            found |= {f"{name}.{layer.layer}": part for name, part in zip("kv", parts, strict=True)}
        return first, found

    def restore(self, length: int, first: int, rows: dict[str, Array]) -> None:
        """Become the cache whose `rows()` these are. ValueError, and nothing changed, if they do not fit this one."""
        if not (0 <= length <= self.max_context_tokens and 0 <= first <= self._needed(length)):
            raise ValueError(f"{length} rows from {first} on do not fit a context of {self.max_context_tokens}")
        for layer in self.spec.layers:
            shape = (length - (first if layer.type == SLIDING else 0), layer.kv_heads, layer.head_dim)
            for name in "kv":
                part = rows.get(f"{name}.{layer.layer}")
                if part is None or part.shape != shape or part.dtype != np.float32:
                    raise ValueError(f"{name}.{layer.layer}: expected float32 rows {list(shape)}")
        old, self.length, self._floor = self.length, length, first
        sliding = {layer: (rows[f"k.{layer}"], rows[f"v.{layer}"]) for layer in self._tail}
        for layer in self.spec.layers:
            for name, buffer in zip("kv", self._past[layer.layer], strict=True):
                if layer.type == FULL:
                    buffer[:length], buffer[length:old] = rows[f"{name}.{layer.layer}"], 0
        for layer, parts in sliding.items():
            for ring, values in zip(self._closed[layer], parts, strict=True):
                _fill_ring(ring, values[: self.start - first], first)
        self._rebuild(sliding, first)


def _fill_ring(ring: Array, rows: Array, position: int) -> None:
    """A ring that holds these rows alone."""
    ring[:] = 0
    _write_ring(ring, rows, position)


def _write_ring(ring: Array, rows: Array, position: int) -> None:
    """rows of the positions from `position` on, each to slot position mod W; of more than W the last W stay."""
    window = len(ring)
    position, rows = position + max(0, len(rows) - window), rows[-window:]
    slot = position % window
    before = min(len(rows), window - slot)  # until the ring wraps
    ring[slot : slot + before] = rows[:before]
    ring[: len(rows) - before] = rows[before:]
