"""A target and a drafter without a model: what the loop computes is only as right as the rows in the real KVCache.

Every KV row is [token, position]. The scripted target derives its next token from the rows that the cache and its masks
show it, so a row committed too much, too little, at a wrong place or left over changes the text.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from runtime_py.cache import KVCache, Layout
from runtime_py.manifest import FULL, SLIDING, KVLayerSpec, KVSpec, TokensSpec
from runtime_py.models import NewRows, TargetOutput

VOCAB, EOS, GROUP = 4999, 1, 2
TOKENS = TokensSpec(bos=2, pad=0, eos=(EOS,), special={})
SLIDING_LAYER, FULL_LAYER = 0, 1
KINDS = {SLIDING_LAYER: SLIDING, FULL_LAYER: FULL}


def kv_spec(window: int, chunk_rows: int) -> KVSpec:
    layers = tuple(KVLayerSpec(layer, kind, kv_heads=1, head_dim=2) for layer, kind in KINDS.items())
    return KVSpec(window, chunk_rows, layers, {kind: layer for layer, kind in KINDS.items()})


@dataclass(frozen=True)
class Script:
    """The text the target writes: a hash of all rows seen, by full and by sliding attention. stops: the numbers of tokens
    after which it chooses the stop token."""

    window: int = 8
    stops: frozenset[int] = frozenset()

    def next_token(self, full: dict[int, int], sliding: dict[int, int]) -> int:
        """full, sliding: position -> token"""
        if len(full) in self.stops:
            return EOS
        return 3 + zlib.crc32(repr((sorted(full.items()), sorted(sliding.items()))).encode()) % (VOCAB - 3)

    def after(self, ids: list[int]) -> int:
        """The next token of a text that every layer sees as it should."""
        full = dict(enumerate(ids))
        return self.next_token(full, {i: token for i, token in full.items() if i > len(ids) - 1 - self.window})

    def reference(self, ids: list[int], max_new_tokens: int, context: int = 10**6) -> list[int]:
        """Naive decoding: the whole text again for each token."""
        new: list[int] = []
        while len(new) < max_new_tokens and len(ids) + len(new) < context and new[-1:] != [EOS]:
            new.append(self.after([*ids, *new]))
        return new


class ScriptedTarget:
    """Stands for models.Target. A hidden row is [position, token, next token]."""

    def __init__(self, script: Script, chunk_rows: int = 128, context: int = 512):
        self.script, self.context, self.chunk_rows = script, context, chunk_rows
        self.spec, self.max_context_tokens = SimpleNamespace(vocab_size=VOCAB), context
        self.calls: list[int] = []  # T of every call

    def new_cache(self, max_context_tokens: int | None = None, margin_rows: int = 0) -> KVCache:
        spec = kv_spec(self.script.window, self.chunk_rows)
        return KVCache(spec, GROUP, max_context_tokens or self.context, margin_rows)

    def forward(self, cache: KVCache, ids: list[int], last_row_only: bool = False) -> TargetOutput:
        self.calls.append(len(ids))
        new, layout = self._new_rows(cache, ids), cache.layout(len(ids))
        nexts = [
            self.script.next_token(
                *(self._seen(cache, layer, kind, new, layout, row) for layer, kind in ((1, FULL), (0, SLIDING)))
            )
            for row in range(len(ids))
        ]
        hidden = np.array([(cache.length + i, ids[i], nexts[i]) for i in range(len(ids))], np.float32)
        logits = np.zeros((len(ids), VOCAB), np.float32)
        logits[range(len(ids)), nexts] = 1
        asked = slice(-1, None) if last_row_only else slice(None)
        return TargetOutput(logits[asked], hidden[asked], new)

    def append(self, cache: KVCache, ids: list[int]) -> None:
        assert 1 <= len(ids) <= cache.room
        new = self._new_rows(cache, ids)
        cache.commit(new.k, new.v, len(ids))

    def _new_rows(self, cache: KVCache, ids: list[int]) -> NewRows:
        k = np.array([[(token, cache.length + i)] for i, token in enumerate(ids)], np.float32)
        return NewRows(k[:, 0], [k, k], [-k, -k])

    @staticmethod
    def _seen(cache: KVCache, layer: int, kind: str, new: NewRows, layout: Layout, row: int) -> dict[int, int]:
        """position -> token of the rows that the masks show to a row of the call."""
        past = (layout.shared if kind == FULL else layout.masks)[f"mask_past_{kind}"][
            0 if kind == FULL else row * GROUP
        ]
        tail = layout.masks[f"mask_tail_{kind}"][row * GROUP]
        seen = []
        for old, open_rows, rows in zip(cache.past(layer, kind), cache.tail(layer, kind), (new.k, new.v), strict=True):
            placed = open_rows + np.tensordot(layout.shared["place"], rows[layer], 1)
            seen.append(np.concatenate([old[past == 0], placed[tail == 0]]))
        return _by_position(*seen)


@dataclass(frozen=True)
class Block:
    """What the drafter is given for one block; full and sliding rows as position -> token."""

    length: int
    token: int
    hidden: tuple[int, ...]
    count: int
    full: dict[int, int]
    sliding: dict[int, int]


@dataclass
class ScriptedDrafter:
    """Stands for models.Drafter: right for exactly the first `right(i)` drafts of block i, wrong after them."""

    script: Script
    right: Callable[[int], int]
    blocks: list[Block] = field(default_factory=list)

    def draft(self, cache: KVCache, token: int, hidden: np.ndarray, count: int) -> list[int]:
        full, sliding = (_by_position(*cache.donor_rows(kind)) for kind in (FULL, SLIDING))
        right = self.right(len(self.blocks))
        self.blocks.append(Block(cache.length, token, tuple(hidden.astype(int).tolist()), count, full, sliding))
        text, drafts = [*(full[i] for i in range(cache.length)), token], []
        for i in range(count):
            true = self.script.after([*text, *drafts])
            drafts.append(true if i < right else 3 + (true + 1 - 3) % (VOCAB - 3))
        return drafts


def cached_ids(cache: KVCache) -> list[int]:
    """The tokens that the cache holds, after checking that each layer holds exactly the rows it should."""
    full, sliding = (_by_position(*cache.donor_rows(kind)) for kind in (FULL, SLIDING))
    if cache.length:
        assert list(full) == list(range(cache.length))
        assert sliding == {i: token for i, token in full.items() if i >= cache.length - cache.spec.window}
    return [full[i] for i in range(cache.length)]


def _by_position(k: np.ndarray, v: np.ndarray) -> dict[int, int]:
    assert np.array_equal(k, -v)
    rows = {int(position): int(token) for token, position in k[:, 0]}
    assert len(rows) == len(k), "a position twice"
    return rows
