"""KVCache against a list of rows: past and tail hold the committed rows and no others, the masks hide exactly what a query
must not see, every key keeps its place until the chunk ends, and reading the cache copies nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_py.cache import MASKED, KVCache
from runtime_py.kv_rows import encode
from runtime_py.manifest import FULL, KV_PARTS, SLIDING, KVLayerSpec, KVSpec

LAYERS = (
    KVLayerSpec(0, SLIDING, kv_heads=2, head_dim=3),
    KVLayerSpec(1, FULL, kv_heads=2, head_dim=5),
    KVLayerSpec(2, SLIDING, kv_heads=2, head_dim=3),
)
DONORS = {SLIDING: 2, FULL: 1}
GROUP = 2
dtypes = st.sampled_from(tuple(KV_PARTS))


def make(window: int, context: int = 64, chunk: int = 4, dtype: str = "float32") -> KVCache:
    return KVCache(KVSpec(window, chunk, LAYERS, DONORS, dtype), GROUP, context)


def new_rows(position: int, rows: int, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """k and v [T, kv, D] of each layer, no value twice; element [t, 0, 0] of k is the row's position."""
    random = np.random.default_rng([seed, position])
    k, v = (
        [random.standard_normal((rows, layer.kv_heads, layer.head_dim)).astype(np.float32) for layer in LAYERS]
        for _ in "kv"
    )
    for part in k:
        part[:, 0, 0] = np.arange(position, position + rows)
    return k, v


def row_bytes(parts: tuple[np.ndarray, ...]) -> list[bytes]:
    """Of each row, k, v and scales in a row."""
    return [b"".join(part.tobytes() for part in row) for row in zip(*parts, strict=True)]


def in_slots(rows: list[bytes], window: int) -> list[bytes]:
    """The last `window` rows as they lie in a ring."""
    last = sorted(range(max(0, len(rows) - window), len(rows)), key=lambda position: position % window)
    return [rows[position] for position in last]


def fill(cache: KVCache, rows: int) -> None:
    while cache.length < rows:
        step = min(cache.room, rows - cache.length)
        cache.commit(*new_rows(cache.length, step), step)


@settings(max_examples=300, deadline=None)
@given(window=st.integers(1, 9), chunk=st.integers(1, 12), dtype=dtypes, data=st.data())
def test_past_and_tail_are_the_committed_rows(window, chunk, dtype, data):
    """Blocks of any size, of which any number of rows is accepted; rings wrap many times. Past rows are those of the
    cache's type, each made alone; the tail's are the float32 rows."""
    cache = make(window, chunk=chunk, dtype=dtype)
    committed: list[list[bytes]] = [[] for _ in LAYERS]
    exact: list[list[bytes]] = [[] for _ in LAYERS]
    for number in range(data.draw(st.integers(0, 20))):
        rows = data.draw(st.integers(1, cache.room))
        accepted = data.draw(st.integers(0, rows))
        if cache.length + accepted > cache.max_context_tokens:
            break
        k, v = new_rows(cache.length, rows, number)
        for layer in LAYERS:
            pairs = [(k[layer.layer][i : i + 1], v[layer.layer][i : i + 1]) for i in range(accepted)]
            committed[layer.layer] += [row_bytes(encode(*pair, dtype))[0] for pair in pairs]
            exact[layer.layer] += [row_bytes(pair)[0] for pair in pairs]
        cache.commit(k, v, accepted)
        for layer in LAYERS:
            rows_known = committed[layer.layer]
            assert cache.length == len(rows_known)
            past = rows_known[: cache.start]
            if cache.start:
                seen = past if layer.type == FULL else in_slots(past, window)
                assert row_bytes(cache.past(layer.layer, layer.type)) == seen
            k_tail, v_tail = cache.tail(layer.layer, layer.type)
            open_rows = cache.length - cache.start
            assert row_bytes((k_tail[:open_rows], v_tail[:open_rows])) == exact[layer.layer][cache.start :]
            assert len(k_tail) == chunk
            assert not k_tail[open_rows:].any() and not v_tail[open_rows:].any()
        for kind, layer in DONORS.items():
            if cache.length:
                seen = committed[layer] if kind == FULL else in_slots(committed[layer], window)
                assert row_bytes(cache.donor_rows(kind)) == seen


@settings(max_examples=150, deadline=None)
@given(window=st.integers(1, 9), chunk=st.integers(1, 12), length=st.integers(0, 40), data=st.data())
def test_masks_hide_exactly_what_a_query_must_not_see(window, chunk, length, data):
    cache = make(window, chunk=chunk)
    fill(cache, length)
    rows = data.draw(st.integers(1, cache.room))
    layout = cache.layout(rows)
    masks = {**layout.masks, **layout.shared}
    place = masks.pop("place")
    for mask in masks.values():
        assert mask.dtype == np.float32
        assert set(np.unique(mask)) <= {0, MASKED}
    past_sliding, past_full = (
        cache.past(layer, kind)[0][:, 0, 0].astype(int) for layer, kind in ((0, SLIDING), (1, FULL))
    )
    tail = cache.start + np.arange(chunk)
    assert np.array_equal(place, tail[:, None] == length + np.arange(rows))
    assert masks["mask_past_full"].shape == (1, len(past_full))
    assert masks["mask_past_sliding"].shape == (rows * GROUP, len(past_sliding))
    assert masks["mask_tail_sliding"].shape == masks["mask_tail_full"].shape == (rows * GROUP, chunk)
    for row in range(rows * GROUP):
        query = length + row // GROUP
        seen = visible(masks["mask_past_sliding"][row], past_sliding) + visible(masks["mask_tail_sliding"][row], tail)
        assert seen == list(range(max(0, query - window + 1), query + 1))
        assert visible(masks["mask_past_full"][0], past_full) + visible(masks["mask_tail_full"][row], tail) == list(
            range(query + 1)
        )


@settings(max_examples=100, deadline=None)
@given(window=st.integers(1, 9), chunk=st.integers(2, 12), length=st.integers(0, 40))
def test_a_query_finds_its_keys_at_the_same_places_alone_and_in_a_block(window, chunk, length):
    """Rows, masks and places of each query of a block that fills the chunk, and of the same query run after a commit."""
    cache = make(window, chunk=chunk)
    fill(cache, length)
    k, v = new_rows(length, rows=cache.room)
    block = [keys_of(cache, k, cache.room, row) for row in range(cache.room)]
    for want in block:
        position = cache.length - length
        assert keys_of(cache, [part[position:] for part in k], 1, 0) == want
        cache.commit([part[position:] for part in k], [part[position:] for part in v], 1)


def keys_of(cache: KVCache, new_k: list[np.ndarray], rows: int, row: int) -> list[bytes]:
    """What the scores of one row are made of: past and tail of every layer, hidden rows as zeros."""
    layout, found = cache.layout(rows), []
    for layer in LAYERS:
        past_mask = layout.shared["mask_past_full"] if layer.type == FULL else layout.masks["mask_past_sliding"]
        tail_mask = layout.masks[f"mask_tail_{layer.type}"][row * GROUP]
        past, tail = (read(layer.layer, layer.type)[0] for read in (cache.past, cache.tail))
        tail = tail + np.tensordot(layout.shared["place"], new_k[layer.layer][:rows], 1)
        past_mask = past_mask[row * GROUP if layer.type == SLIDING else 0]
        for mask, k in ((past_mask, past), (tail_mask, tail)):
            found.append(np.where(mask[:, None, None] == 0, k, 0).tobytes())
    return found


def visible(mask: np.ndarray, positions: np.ndarray) -> list[int]:
    return sorted(positions[mask == 0].tolist())


def test_the_dead_row_before_the_first_commit_is_hidden():
    cache = make(window=4)
    layout = cache.layout(2)
    for kind, layer in DONORS.items():
        assert len(cache.past(layer, kind)[0]) == len(cache.donor_rows(kind)[0]) == 1
    assert np.all(layout.masks["mask_past_sliding"] == MASKED)
    assert np.all(layout.shared["mask_past_full"] == MASKED)


@pytest.mark.parametrize("dtype", KV_PARTS)
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 11])
def test_reading_copies_nothing(length, dtype):
    cache = make(window=4, dtype=dtype)
    fill(cache, length)
    for layer in LAYERS:
        for read in (cache.past, cache.tail):
            for part, again in zip(read(layer.layer, layer.type), read(layer.layer, layer.type), strict=True):
                assert part.flags.c_contiguous
                assert np.shares_memory(part, again)
                assert part.shape[1:] in ((layer.kv_heads, layer.head_dim), (layer.kv_heads,))
    for kind in DONORS:
        for part, again in zip(cache.donor_rows(kind), cache.donor_rows(kind), strict=True):
            assert part.flags.c_contiguous
            assert np.shares_memory(part, again)
    if cache.start:
        masks = [cache.layout(1).shared["mask_past_full"] for _ in range(2)]
        assert np.shares_memory(*masks)


@pytest.mark.parametrize("accepted", [2, 3])
def test_commit_beyond_the_context_is_refused_and_changes_nothing(accepted):
    cache = make(window=4, context=9)
    fill(cache, 8)
    before = [row_bytes(cache.past(layer.layer, layer.type)) for layer in LAYERS]
    with pytest.raises(ValueError, match=rf"context is full: 8 \+ {accepted} rows of 9"):
        cache.commit(*new_rows(8, 3), accepted)
    assert cache.length == 8
    assert [row_bytes(cache.past(layer.layer, layer.type)) for layer in LAYERS] == before
    cache.commit(*new_rows(8, 3), 1)
    assert cache.length == cache.max_context_tokens
