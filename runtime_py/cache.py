"""KV cache of committed rows. It owns the position: a row comes in by `commit` only, so a rejected row never lands.

The text is cut into chunks of C positions. Rows of closed chunks are the past, the open chunk is the tail: a token sees
every key at the same place of the same sum, alone or in a block, as long as no call crosses a chunk's end (`room`).
Rows go by `rewind`: within the open chunk always, further back as far as the rows that the windows need are still held, and
with rows narrower than float32 to the ends of chunks alone.

Legend: P past rows, T new rows, C rows of a chunk, kv key/value heads, D head_dim, W window, g query heads per kv head.
"""

from dataclasses import dataclass

import numpy as np

from .kv_rows import encode
from .manifest import FULL, KV_PARTS, SLIDING, KVLayerSpec, KVSpec

Array = np.ndarray
Parts = tuple[Array, ...]  # what rows are made of, in the order of KV_PARTS
MASKED = np.float32(-1e9)


@dataclass(frozen=True)
class Layout:
    """Where the rows of a call stand. masks: additive, a row per (token, query head of a group): mask_past_sliding
    [T * g, P], mask_tail_sliding and mask_tail_full [T * g, C]. shared: mask_past_full [1, P]; place [C, T], 1 at the
    slot of each new row."""

    masks: dict[str, Array]
    shared: dict[str, Array]


class KVCache:
    """Token-major rows [rows, kv, D] of every layer that owns KV: committed ones in the spec's dtype, those of the open
    chunk in float32 as well. Full layers keep a row per position; float32 ones are past and tail in one buffer. Sliding
    layers keep a ring of the last W rows of closed chunks (slot = position mod W); the sliding donor also a ring of the
    last W rows of all, which the drafter reads. Tail rows from the position on are zero. margin_rows: with more than 0, a
    second ring of the last W + margin_rows rows of closed chunks, so that `rewind` reaches back that far behind the open
    chunk.

    A narrower row is made from its float32 row alone (`encode`), of which it is the only trace once the chunk is closed.
    """

    def __init__(self, spec: KVSpec, group: int, max_context_tokens: int, margin_rows: int = 0):
        self.spec, self.group, self.max_context_tokens = spec, group, max_context_tokens
        self.length = 0  # committed rows; the next row's position
        self._floor = 0  # a rewind leaves holes below it in the rings of closed chunks
        self._exact = spec.dtype == "float32"  # whether committed rows are the float32 rows themselves
        self._past = {layer.layer: self._zeros(layer, self._past_capacity(layer.type)) for layer in spec.layers}
        self._tail = {
            layer.layer: _zeros(layer, spec.chunk_rows, KV_PARTS["float32"], "float32")
            for layer in spec.layers
            if layer.type == SLIDING or not self._exact
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

    def _zeros(self, layer: KVLayerSpec, rows: int) -> Parts:
        return _zeros(layer, rows, KV_PARTS[self.spec.dtype], self.spec.dtype)

    @property
    def start(self) -> int:
        """First position of the open chunk."""
        return self.length - self.length % self.spec.chunk_rows

    @property
    def room(self) -> int:
        """Rows that the open chunk still takes, at least 1: the most tokens of one call."""
        return self.spec.chunk_rows - self.length % self.spec.chunk_rows

    def past(self, layer: int, kind: str) -> Parts:
        """KV_PARTS of closed chunks, each with P rows: views. P is at least 1, a dead row that the masks hide before the
        first."""
        rows = max(1, min(self.start, self.spec.window) if kind == SLIDING else self.start)
        return _first(self._past[layer], rows)

    def tail(self, layer: int, kind: str) -> Parts:
        """k, v float32 [C, kv, D] of the open chunk: views; zero from the position on."""
        if layer in self._tail:
            return self._tail[layer]
        return tuple(buffer[self.start : self.start + self.spec.chunk_rows] for buffer in self._past[layer])

    def donor_rows(self, kind: str) -> Parts:
        """KV_PARTS of all committed rows of the donor that a type's drafter layers read: views."""
        buffers = self._donor_ring if kind == SLIDING else self._past[self.spec.donors[FULL]]
        return _first(buffers, max(1, min(self.length, self.spec.window) if kind == SLIDING else self.length))

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
        """Append the first `rows` of the new float32 rows [T, kv, D] of every layer, in the order of the spec."""
        if self.length + rows > self.max_context_tokens:
            raise ValueError(f"context is full: {self.length} + {rows} rows of {self.max_context_tokens}")
        assert rows <= self.room
        first, donor = self.length - self.start, self.spec.donors[SLIDING]
        for layer, *new in zip(self.spec.layers, new_k, new_v, strict=True):
            k, v = (values[:rows] for values in new)
            for buffer, values in zip(self.tail(layer.layer, layer.type), (k, v), strict=True):
                buffer[first : first + rows] = values
            if layer.type == FULL and not self._exact:
                _write(self._past[layer.layer], self._encode(k, v), self.length)
            if layer.layer == donor:
                _write_ring(self._donor_ring, self._encode(k, v), self.length)
        if rows == self.room:
            self._close_chunk()
        self.length += rows

    def _encode(self, k: Array, v: Array) -> Parts:
        return encode(k, v, self.spec.dtype)

    def _close_chunk(self) -> None:
        """The open chunk of the sliding layers joins the past."""
        for layer, closed in self._closed.items():
            rows = self._encode(*self._tail[layer])
            _write_ring(self._past[layer], rows, self.start)
            if closed is not self._past[layer]:
                _write_ring(closed, rows, self.start)
        for tail in self._tail.values():
            _clear(tail, 0)
        positions = np.arange(self.start, self.start + self.spec.chunk_rows)
        _write_ring((self._positions,), (positions,), self.start)

    def _oldest(self) -> int:
        """The first position of which the sliding layers' rows are held."""
        return max(self._floor, self.start - len(next(iter(self._closed.values()))[0]))

    def _needed(self, length: int) -> int:
        """The first position whose sliding rows a cache of `length` rows has."""
        return max(0, length - length % self.spec.chunk_rows - self.spec.window)

    def holds(self, length: int) -> bool:
        """Whether `rewind(length)` can be exact. To open a closed chunk again takes its float32 rows, so that a narrower
        cache goes back to where no chunk is open."""
        if length == 0 or self.start <= length <= self.length:
            return True
        opens = length % self.spec.chunk_rows > 0
        return 0 < length < self.length and self._needed(length) >= self._oldest() and (self._exact or not opens)

    def held(self, length: int) -> int:
        """How many of the first `length` rows an exact rewind can leave."""
        chunks = length - length % self.spec.chunk_rows
        return next(rows for rows in (length, chunks, 0) if self.holds(rows))

    def rewind(self, length: int) -> None:
        """Forget the rows from `length` on: the cache is, bit for bit, what it was. ValueError if it holds too little."""
        if not self.holds(length):
            raise ValueError(f"the cache of {self.length} rows cannot be rewound to {length}; run the text again")
        if length == self.length:
            return
        first, floor, start = self._needed(length), self._oldest(), self.start
        rows = {layer: self._sliding_rows(layer, first, length) for layer in self._closed}
        for layer in self.spec.layers:
            if layer.type == FULL:
                _clear(self._past[layer.layer], length, self.length)
        self.length, self._floor = length, floor if length else 0
        for layer, tail in self._tail.items():
            _clear(tail, length - start if self.start == start else 0)
            if self._exact and self.start < start:
                _write(tail, tuple(part[self.start - first :] for part in rows[layer]), 0)
        self._rebuild(rows, first)

    def _sliding_rows(self, layer: int, first: int, end: int) -> Parts:
        """Copies of the committed rows of the positions from `first` on."""
        closed = np.arange(first, max(first, min(end, self.start))) % len(self._closed[layer][0])
        open_rows = slice(max(0, first - self.start), max(0, end - self.start))
        tail = self._encode(*(part[open_rows] for part in self._tail[layer]))
        return tuple(np.concatenate([ring[closed], rows]) for ring, rows in zip(self._closed[layer], tail, strict=True))

    def _rebuild(self, rows: dict[int, Parts], first: int) -> None:
        """Rings of W rows from the committed sliding rows of the positions first..length - 1 of each layer."""
        for layer, parts in rows.items():
            _fill_ring(self._past[layer], _first(parts, self.start - first), first)
        _fill_ring(self._donor_ring, rows[self.spec.donors[SLIDING]], first)
        self._positions[:] = -1
        _write_ring((self._positions,), (np.arange(first, self.start),), first)

    def rows(self) -> tuple[int, dict[str, Array]]:
        """What is held, for a file: the position of the first sliding row; the KV_PARTS of closed chunks of each layer, as
        k.i [rows, kv, D] and so on, of every position for full layers; tail_k.i, tail_v.i float32 of the open chunk."""
        first, found = self._oldest(), {}
        for layer in self.spec.layers:
            full = layer.type == FULL
            past = (
                _first(self._past[layer.layer], self.start)
                if full
                else self._sliding_rows(layer.layer, first, self.start)
            )
            tail = _first(self.tail(layer.layer, layer.type), self.length - self.start)
            found |= dict(zip(self._forms(layer, 0, 0), (*past, *tail), strict=True))
        return first, found

    def restore(self, length: int, first: int, rows: dict[str, Array]) -> None:
        """Become the cache whose `rows()` these are. ValueError, and nothing changed, if they do not fit this one."""
        if not (0 <= length <= self.max_context_tokens and 0 <= first <= self._needed(length)):
            raise ValueError(f"{length} rows from {first} on do not fit a context of {self.max_context_tokens}")
        start = length - length % self.spec.chunk_rows
        forms = {
            layer: self._forms(layer, start - (first if layer.type == SLIDING else 0), length - start)
            for layer in self.spec.layers
        }
        for name, (shape, dtype) in (item for form in forms.values() for item in form.items()):
            part = rows.get(name)
            if part is None or part.shape != shape or part.dtype != dtype:
                raise ValueError(f"{name}: expected {dtype} rows {list(shape)}")
        old, self.length, self._floor = self.length, length, first
        for layer, form in forms.items():
            *past, k, v = (rows[name] for name in form)
            if layer.type == SLIDING:
                _fill_ring(self._closed[layer.layer], past, first)
            else:
                _write(self._past[layer.layer], past, 0)
                _clear(self._past[layer.layer], start, old)
                _write(self._past[layer.layer], self._encode(k, v), start)
            if layer.layer in self._tail:
                _clear(self._tail[layer.layer], 0)
                _write(self._tail[layer.layer], (k, v), 0)
        needed = self._needed(length)
        self._rebuild({layer: self._sliding_rows(layer, needed, length) for layer in self._closed}, needed)

    def _forms(self, layer: KVLayerSpec, past_rows: int, tail_rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> shape and dtype of what `rows` gives of a layer, in its order."""
        heads, size, i = layer.kv_heads, layer.head_dim, layer.layer
        values, scales = ((past_rows, heads, size), self.spec.dtype), ((past_rows, heads), "float32")
        past = {f"{part}.{i}": scales if part.endswith("scale") else values for part in KV_PARTS[self.spec.dtype]}
        return past | dict.fromkeys((f"tail_k.{i}", f"tail_v.{i}"), ((tail_rows, heads, size), "float32"))


def _zeros(layer: KVLayerSpec, rows: int, parts: tuple[str, ...], dtype: str) -> Parts:
    """np.zeros maps the pages, only rows written become resident"""
    shape = rows, layer.kv_heads, layer.head_dim
    return tuple(np.zeros(shape[:2], np.float32) if "scale" in part else np.zeros(shape, dtype) for part in parts)


def _first(parts: Parts, rows: int) -> Parts:
    return tuple(part[:rows] for part in parts)


def _write(buffers: Parts, parts: Parts, row: int) -> None:
    for buffer, values in zip(buffers, parts, strict=True):
        buffer[row : row + len(values)] = values


def _clear(buffers: Parts, first: int, end: int | None = None) -> None:
    for buffer in buffers:
        buffer[first:end] = 0


def _fill_ring(ring: Parts, rows: Parts, position: int) -> None:
    """A ring that holds these rows alone."""
    _clear(ring, 0)
    _write_ring(ring, rows, position)


def _write_ring(ring: Parts, rows: Parts, position: int) -> None:
    """Rows of the positions from `position` on, each to slot position mod W; of more than W the last W stay."""
    for slots, values in zip(ring, rows, strict=True):
        window = len(slots)
        first, values = position + max(0, len(values) - window), values[-window:]
        slot = first % window
        before = min(len(values), window - slot)  # until the ring wraps
        slots[slot : slot + before] = values[:before]
        slots[: len(values) - before] = values[before:]
