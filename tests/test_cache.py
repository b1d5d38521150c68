"""KVCache against a list of rows: past rows are the committed ones and no others, the masks hide exactly what a query must
not see, and reading the cache copies nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_py.cache import MASKED, KVCache
from runtime_py.manifest import FULL, SLIDING, KVLayerSpec, KVSpec

LAYERS = (
    KVLayerSpec(0, SLIDING, kv_heads=2, head_dim=3),
    KVLayerSpec(1, FULL, kv_heads=2, head_dim=5),
    KVLayerSpec(2, SLIDING, kv_heads=2, head_dim=3),
)
DONORS = {SLIDING: 2, FULL: 1}
GROUP = 2


def make(window: int, context: int = 64) -> KVCache:
    return KVCache(KVSpec(window, LAYERS, DONORS), GROUP, context)


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


def by_position(k: np.ndarray, v: np.ndarray) -> dict[int, bytes]:
    return {int(key[0, 0]): key.tobytes() + value.tobytes() for key, value in zip(k, v, strict=True)}


def fill(cache: KVCache, rows: int) -> None:
    while cache.length < rows:
        step = min(cache.spec.window, rows - cache.length)
        cache.commit(*new_rows(cache.length, step), step)


@settings(max_examples=150, deadline=None)
@given(window=st.integers(1, 9), data=st.data())
def test_past_rows_are_the_committed_ones(window, data):
    """Blocks of any size, of which any number of rows is accepted; the ring wraps many times."""
    cache = make(window)
    committed: list[list[dict[int, bytes]]] = [[] for _ in LAYERS]
    block = st.integers(1, window).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(0, rows)))
    for number, (rows, accepted) in enumerate(data.draw(st.lists(block, max_size=20))):
        if cache.length + accepted > cache.max_context_tokens:
            break
        k, v = new_rows(cache.length, rows, number)
        for layer in LAYERS:
            table = by_position(k[layer.layer], v[layer.layer])
            committed[layer.layer] += [{position: table[position]} for position in sorted(table)[:accepted]]
        cache.commit(k, v, accepted)
        for layer in LAYERS:
            rows_seen = committed[layer.layer] if layer.type == FULL else committed[layer.layer][-window:]
            assert cache.length == len(committed[layer.layer])
            if cache.length:
                expected = {position: row for entry in rows_seen for position, row in entry.items()}
                assert by_position(*cache.past(layer.layer, layer.type)) == expected


@settings(max_examples=100, deadline=None)
@given(window=st.integers(1, 9), length=st.integers(0, 40), data=st.data())
def test_masks_hide_exactly_what_a_query_must_not_see(window, length, data):
    rows = data.draw(st.integers(1, window))
    cache = make(window)
    fill(cache, length)
    masks = cache.masks(rows)
    for mask in masks.values():
        assert mask.dtype == np.float32
        assert set(np.unique(mask)) <= {0, MASKED}
    past_sliding, past_full = (
        cache.past(layer, kind)[0][:, 0, 0].astype(int) for layer, kind in ((0, SLIDING), (1, FULL))
    )
    new = np.arange(length, length + rows)
    assert masks["mask_full"].shape == (1, len(past_full))
    assert masks["mask_sliding"].shape == (rows * GROUP, len(past_sliding))
    assert masks["mask_new"].shape == (rows * GROUP, rows)
    assert visible(masks["mask_full"][0], past_full) == list(range(length))
    for row in range(rows * GROUP):
        query = length + row // GROUP
        seen = visible(masks["mask_sliding"][row], past_sliding) + visible(masks["mask_new"][row], new)
        assert seen == list(range(max(0, query - window + 1), query + 1))
        assert visible(masks["mask_new"][row], new) == list(range(length, query + 1))


def visible(mask: np.ndarray, positions: np.ndarray) -> list[int]:
    return sorted(positions[mask == 0].tolist())


def test_the_dead_row_before_the_first_commit_is_hidden():
    cache = make(window=4)
    masks = cache.masks(2)
    for kind in (SLIDING, FULL):
        assert cache.past_rows(kind) == len(cache.donor_rows(kind)[0]) == 1
        assert np.all(masks[f"mask_{kind}"] == MASKED)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 11])
def test_reading_copies_nothing(length):
    cache = make(window=4)
    fill(cache, length)
    for layer in LAYERS:
        for part, again in zip(cache.past(layer.layer, layer.type), cache.past(layer.layer, layer.type), strict=True):
            assert part.flags.c_contiguous
            assert not part.flags.owndata
            assert np.shares_memory(part, again)
            assert part.shape == (cache.past_rows(layer.type), layer.kv_heads, layer.head_dim)
    for kind, layer in DONORS.items():
        for part, own in zip(cache.donor_rows(kind), cache.past(layer, kind), strict=True):
            assert np.shares_memory(part, own)
    if length:
        assert np.shares_memory(cache.masks(1)["mask_full"], cache.masks(3)["mask_full"])


@pytest.mark.parametrize("accepted", [2, 3])
def test_commit_beyond_the_context_is_refused_and_changes_nothing(accepted):
    cache = make(window=4, context=9)
    fill(cache, 8)
    before = [by_position(*cache.past(layer.layer, layer.type)) for layer in LAYERS]
    with pytest.raises(ValueError, match=rf"context is full: 8 \+ {accepted} rows of 9"):
        cache.commit(*new_rows(8, 3), accepted)
    assert cache.length == 8
    assert [by_position(*cache.past(layer.layer, layer.type)) for layer in LAYERS] == before
    cache.commit(*new_rows(8, 3), 1)
    assert cache.length == cache.max_context_tokens
