"""A cache that is rewound, or read back from its rows, is bit for bit one that never went further, and goes on like it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_py.cache import KVCache
from runtime_py.manifest import FULL, KV_PARTS, SLIDING, KVSpec

from .test_cache import DONORS, GROUP, LAYERS, dtypes, new_rows

CONTEXT = 64
sizes = settings(max_examples=300, deadline=None)
anything = {
    "window": st.integers(1, 12),
    "chunk": st.integers(1, 12),
    "margin": st.integers(0, 20),
    "dtype": dtypes,
    "length": st.integers(0, CONTEXT),
    "data": st.data(),
}


def make(window: int, chunk: int, margin: int = 0, dtype: str = "float32") -> KVCache:
    return KVCache(KVSpec(window, chunk, LAYERS, DONORS, dtype), GROUP, CONTEXT, margin)


def fill(cache: KVCache, rows: int) -> None:
    """A row's values depend on its position alone."""
    while cache.length < rows:
        cache.commit(*new_rows(cache.length, 1), 1)


def seen(cache: KVCache) -> list[bytes]:
    """All that graphs and drafter are given, and every buffer behind it but the second ring."""
    parts = [part for buffers in cache._past.values() for part in buffers]
    parts += [part for layer in LAYERS for part in cache.tail(layer.layer, layer.type)]
    parts += [part for layer in LAYERS for part in cache.past(layer.layer, layer.type)]
    parts += [*cache._donor_ring, *(part for kind in (SLIDING, FULL) for part in cache.donor_rows(kind))]
    if cache.length < CONTEXT:
        layout = cache.layout(1)
        parts += [*layout.masks.values(), *layout.shared.values()]
    return [cache._positions.tobytes(), *(part.tobytes() for part in parts)]


def fresh(cache: KVCache) -> KVCache:
    other = make(cache.spec.window, cache.spec.chunk_rows, dtype=cache.spec.dtype)
    fill(other, cache.length)
    return other


@sizes
@given(**anything)
def test_rewound_cache_is_one_that_never_went_further(window, chunk, margin, dtype, length, data):
    """Again and again, with other rows committed in between."""
    cache = make(window, chunk, margin, dtype)
    for _ in range(data.draw(st.integers(1, 4), "rewinds")):
        fill(cache, data.draw(st.integers(cache.length, max(length, cache.length)), "to"))
        held = [n for n in range(cache.length + 1) if cache.holds(n)]
        cache.rewind(data.draw(st.sampled_from(held), "rewind"))
        assert seen(cache) == seen(fresh(cache))
        before, others = cache.length, min(cache.room - 1, CONTEXT - cache.length)
        cache.commit(*new_rows(before, others + 1, seed=9), others)  # what is taken back again
        cache.rewind(before)
        assert seen(cache) == seen(fresh(cache))
    fill(cache, CONTEXT)
    assert seen(cache) == seen(fresh(cache))


@sizes
@given(**anything)
def test_what_is_held(window, chunk, margin, dtype, length, data):
    """The open chunk, everything while no ring has wrapped, and the margin behind the open chunk's beginning; of rows
    narrower than float32 no closed chunk can be opened again."""
    cache = make(window, chunk, margin, dtype)
    fill(cache, length)
    for n in range(length + 1):
        reach = n // chunk * chunk >= cache.start - margin
        unwrapped = cache.start <= window + margin
        opens = n < cache.start and n % chunk > 0
        assert cache.holds(n) == (n == 0 or ((reach or unwrapped) and not (opens and dtype != "float32")))
        assert cache.held(n) == max(rows for rows in range(n + 1) if cache.holds(rows))
    assert not cache.holds(length + 1) and not cache.holds(-1)
    for n in (length + 1, -1, *(n for n in range(length) if not cache.holds(n))):
        before = seen(cache)
        with pytest.raises(ValueError, match=f"cache of {length} rows cannot be rewound to {n}; run the text again"):
            cache.rewind(n)
        assert seen(cache) == before


@sizes
@given(**anything, used=st.integers(0, CONTEXT))
def test_cache_read_back_from_its_rows_is_the_same_and_holds_as_much(window, chunk, margin, dtype, length, data, used):
    cache, other = make(window, chunk, margin, dtype), make(window, chunk, margin, dtype)
    fill(cache, length)
    cache.rewind(data.draw(st.sampled_from([n for n in range(length + 1) if cache.holds(n)]), "rewind"))
    fill(other, used)
    other.restore(cache.length, *cache.rows())
    assert seen(other) == seen(fresh(cache))
    held = [n for n in range(cache.length + 1) if cache.holds(n)]
    assert held == [n for n in range(cache.length + 1) if other.holds(n)]
    other.rewind(data.draw(st.sampled_from(held), "rewind again"))
    assert seen(other) == seen(fresh(other))


@pytest.mark.parametrize("dtype", KV_PARTS)
def test_rows_that_do_not_fit_change_nothing(dtype):
    cache = make(window=4, chunk=4, dtype=dtype)
    fill(cache, 10)
    first, rows = cache.rows()
    before = seen(cache)
    short = {**rows, "k.1": rows["k.1"][1:]}
    missing = {name: part for name, part in rows.items() if name != "v.2"}
    double = {**rows, "v.0": rows["v.0"].astype(np.float64)}
    narrow = {**rows, "tail_v.1": rows["tail_v.1"].astype(np.float16)}
    for length, start, parts, message in (
        (10, first, short, rf"k.1: expected {dtype} rows \[8, 2, 5\]"),
        (10, first, missing, "v.2: expected"),
        (10, first, double, "v.0: expected"),
        (10, first, narrow, r"tail_v.1: expected float32 rows \[2, 2, 5\]"),
        (CONTEXT + 1, first, rows, "do not fit a context of 64"),
        (10, first + 1, rows, f"10 rows from {first + 1} on do not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.restore(length, start, parts)
        assert seen(cache) == before
