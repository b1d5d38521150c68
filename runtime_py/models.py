"""Target and drafter as the loop sees them: token ids in, logits, hidden rows and new KV rows out.

One class per graph builds its inputs. Legend: T rows run, R rows asked for (all or the last), V vocab_size,
H hidden_size, h the drafter's, L layers, d per_layer_input_size, g query heads per kv head.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .cache import KVCache, Layout
from .embeddings import EmbeddingTable, map_array, to_float
from .files import check_hashes, check_sizes, graph_files
from .graph import Graph, Wrap, load_graph, load_graphs, unwrapped
from .manifest import FULL, KV_PARTS, SLIDING, CentroidHeadSpec, Manifest

Array = np.ndarray
KINDS = (SLIDING, FULL)


@dataclass(frozen=True)
class Rows:
    """What the host prepares for T tokens: embeds [T, H] (scaled), per_layer [L, T, d], cos/sin [T, D] by input name."""

    embeds: Array
    per_layer: Array
    rope: dict[str, Array]
    layout: Layout

    def last(self, group: int) -> "Rows":
        """The same for the last row alone."""
        masks = {name: mask[-group:] for name, mask in self.layout.masks.items()}
        rope = {name: part[-1:] for name, part in self.rope.items()}
        return Rows(self.embeds[-1:], self.per_layer[:, -1:], rope, Layout(masks, self.layout.shared))

    def feeds(self, layers: range) -> dict[str, Array]:
        per_layer = {f"per_layer.{i}": self.per_layer[i] for i in layers}
        return {"embeds": self.embeds, **per_layer, **self.rope, **self.layout.masks, **self.layout.shared}


@dataclass(frozen=True)
class NewRows:
    """x [T, H] for the cross_decoder, and the uncommitted KV rows [T, kv, D] of every layer that owns KV."""

    x: Array
    k: list[Array]
    v: list[Array]


@dataclass(frozen=True)
class TargetOutput:
    """logits [R, V] and hidden [R, H] (after the final norm) of the asked rows; new KV rows of all T."""

    logits: Array
    hidden: Array
    new: NewRows


class SelfDecoder:
    def __init__(self, manifest: Manifest, graph: Graph):
        self._graph, self._layers, self._parts = graph, manifest.kv.layers, KV_PARTS[manifest.kv.dtype]
        self._range = range(manifest.target.num_own_kv_layers)

    def __call__(self, rows: Rows, cache: KVCache) -> NewRows:
        feeds = rows.feeds(self._range)
        for layer in self._layers:
            past = cache.past(layer.layer, layer.type)
            feeds |= {f"past_{part}.{layer.layer}": rows for part, rows in zip(self._parts, past, strict=True)}
            feeds[f"tail_k.{layer.layer}"], feeds[f"tail_v.{layer.layer}"] = cache.tail(layer.layer, layer.type)
        out = self._graph(feeds)
        k, v = ([out[f"new_{w}.{layer.layer}"] for layer in self._layers] for w in "kv")
        return NewRows(out["x"], k, v)


class CrossDecoder:
    def __init__(self, manifest: Manifest, graph: Graph):
        self._graph, self._donors, self._parts = graph, manifest.kv.donors, KV_PARTS[manifest.kv.dtype]
        self._range = range(manifest.target.num_own_kv_layers, manifest.target.num_layers)

    def __call__(self, rows: Rows, new: NewRows, cache: KVCache) -> tuple[Array, Array]:
        """rows: the asked ones -> logits [R, V], hidden [R, H]"""
        feeds = {"x": new.x[-len(rows.embeds) :], **rows.feeds(self._range)}
        for kind in KINDS:
            donor = self._donors[kind]
            feeds |= {f"{part}_{kind}": rows for part, rows in zip(self._parts, cache.past(donor, kind), strict=True)}
            feeds[f"tail_k_{kind}"], feeds[f"tail_v_{kind}"] = cache.tail(donor, kind)
            feeds[f"new_k_{kind}"], feeds[f"new_v_{kind}"] = new.k[donor], new.v[donor]
        out = self._graph(feeds)
        return out["logits"], out["hidden"]


class Target:
    """The two graphs of the target and its embedding tables."""

    def __init__(
        self, manifest: Manifest, backend: str, self_decoder: SelfDecoder, cross_decoder: CrossDecoder, bundle: Path
    ):
        self.spec, self._self_decoder, self._cross_decoder = manifest.target, self_decoder, cross_decoder
        self.max_context_tokens = manifest.backends[backend].max_context_tokens
        self.group = manifest.target.query_heads // manifest.kv.layers[0].kv_heads
        self._kv = manifest.kv
        self._tokens = EmbeddingTable(bundle, manifest.backends[backend].token_table)
        self._per_layer = EmbeddingTable(bundle, manifest.target.per_layer_table)

    def new_cache(self, max_context_tokens: int | None = None, margin_rows: int = 0) -> KVCache:
        return KVCache(self._kv, self.group, max_context_tokens or self.max_context_tokens, margin_rows)

    def embed(self, ids: list[int]) -> Array:
        """[len(ids), H], scaled"""
        return self._tokens.rows(ids)

    def prepare(self, cache: KVCache, ids: list[int]) -> Rows:
        """Inputs of len(ids) tokens that follow the committed rows."""
        per_layer = self._per_layer.rows(ids).reshape(len(ids), self.spec.num_layers, -1)
        return Rows(
            embeds=self.embed(ids),
            per_layer=np.ascontiguousarray(per_layer.transpose(1, 0, 2)),
            rope=rope_rows(self.spec.inv_freq, np.arange(cache.length, cache.length + len(ids))),
            layout=cache.layout(len(ids)),
        )

    def forward(self, cache: KVCache, ids: list[int], last_row_only: bool = False) -> TargetOutput:
        """Run tokens that follow the committed rows; nothing is committed. At most cache.room tokens."""
        rows = self.prepare(cache, ids)
        new = self._self_decoder(rows, cache)
        asked = rows.last(self.group) if last_row_only else rows
        logits, hidden = self._cross_decoder(asked, new, cache)
        return TargetOutput(logits, hidden, new)

    def append(self, cache: KVCache, ids: list[int]) -> None:
        """Run and commit tokens whose logits nobody asks for: the self_decoder alone."""
        new = self._self_decoder(self.prepare(cache, ids), cache)
        cache.commit(new.k, new.v, len(ids))


class CentroidHead:
    """The drafter's head: the best top_k clusters of C, then the rows of their V/C tokens each. Never vocabulary-wide."""

    def __init__(self, bundle: Path, spec: CentroidHeadSpec):
        (clusters, rows), table = spec.token_ordering.shape, spec.table
        self._top_k, self._bits, self._zero_point = spec.top_k, table.bits, table.zero_point
        self._centroids = np.array(map_array(bundle, spec.centroids))  # [C, h], read whole at every step
        self._ids = map_array(bundle, spec.token_ordering)  # [C, V / C]
        self._table = map_array(bundle, table.data).reshape(clusters, rows, -1)
        self._scales = to_float(map_array(bundle, table.scales)).reshape(clusters, rows, -1) if table.scales else None
        self._block_of = np.arange(table.columns) // table.block  # [h]

    def candidates(self, hidden: Array) -> tuple[Array, Array]:
        """hidden [h] -> token ids and logits, both [top_k * V / C]"""
        # not @: of this size it is shared among BLAS' own threads, which wait milliseconds for a core where the graph's spin
        nearness = np.vecdot(self._centroids, hidden)
        best = np.argpartition(nearness, -self._top_k)[-self._top_k :]
        rows = self._table[best]
        # two values a byte are taken apart: less work than to put them side by side first
        parts = (rows & 15, rows >> 4) if self._bits == 4 else (rows,)
        # a column for every scale of a row, for scales are applied to sums, which are fewer than weights
        by_block = np.zeros((len(parts) * rows.shape[-1], self._block_of[-1] + 1), np.float32)
        by_block[np.arange(len(hidden)), self._block_of] = hidden
        sums = (part.astype(np.float32) @ by_block[place :: len(parts)] for place, part in enumerate(parts))
        logits = sum(sums) - self._zero_point * by_block.sum(0)
        if self._scales is not None:
            logits *= self._scales[best]
        return self._ids[best].ravel(), logits.sum(-1).ravel()

    def __call__(self, hidden: Array) -> int:
        ids, logits = self.candidates(hidden)
        return int(ids[logits.argmax()])


class Drafter:
    """Drafts tokens one by one from the target's committed KV rows; it keeps no cache of its own."""

    def __init__(self, manifest: Manifest, graph: Graph, bundle: Path, target: Target):
        self.spec, self._graph, self._target = manifest.drafter, graph, target
        self._parts = KV_PARTS[manifest.kv.dtype]
        head = manifest.drafter.centroid_head
        self._head = CentroidHead(bundle, head) if head else None

    def draft(self, cache: KVCache, token: int, hidden: Array, count: int) -> list[int]:
        """`count` tokens after the pending `token`. hidden [H]: the target's post-norm row that produced it."""
        block = self.block_inputs(cache)
        state, drafts = hidden[None], []
        for _ in range(count):
            token, state = self.step(block, token, state)
            drafts.append(token)
        return drafts

    def block_inputs(self, cache: KVCache) -> dict[str, Array]:
        """Inputs that stay the same within a block: the draft's position and the committed rows of the donors."""
        tokens = cache.length + 1  # N, with the pending one
        block = rope_rows(self.spec.inv_freq, np.array([tokens + self.spec.position_offset]))
        for kind in KINDS:
            block |= {f"{part}_{kind}": rows for part, rows in zip(self._parts, cache.donor_rows(kind), strict=True)}
        return block

    def step(self, block: dict[str, Array], token: int, state: Array) -> tuple[int, Array]:
        """-> drafted token, recurrent state [1, H]"""
        out = self._graph({"pair": np.concatenate([self._target.embed([token]), state], 1), **block})
        return self._head(out["hidden"][0]) if self._head else int(out["logits"][0].argmax()), out["state"]


def rope_rows(inv_freq: dict[str, tuple[float, ...]], positions: Array) -> dict[str, Array]:
    """cos_*, sin_* [T, D] of the positions, both halves equal. Angles are float32 products; their cosines are taken in double
    and rounded, for numpy's in float32 have other bits on other processors, and Java's as well."""
    rope = {}
    for kind in KINDS:
        angles = np.outer(positions.astype(np.float32), np.array(inv_freq[kind], np.float32)).astype(np.float64)
        for name, function in (("cos", np.cos), ("sin", np.sin)):
            half = function(angles).astype(np.float32)
            rope[f"{name}_{kind}"] = np.concatenate([half, half], 1)
    return rope


def load_target(bundle: Path, manifest: Manifest, backend: str, threads: int, wrap: Wrap = unwrapped) -> Target:
    """ValueError if a file is missing, has the wrong size or does not load."""
    tables = (manifest.backends[backend].token_table, manifest.target.per_layer_table)
    check_sizes(bundle, manifest, {array.file for table in tables for array in (table.data, table.scales) if array})
    names = ("self_decoder", "cross_decoder")
    first, second = map(wrap, names, load_graphs(bundle, manifest, names, backend, threads))
    return Target(manifest, backend, SelfDecoder(manifest, first), CrossDecoder(manifest, second), bundle)


def load_drafter(
    bundle: Path, manifest: Manifest, target: Target, backend: str, threads: int, wrap: Wrap = unwrapped
) -> Drafter:
    """ValueError if a file is missing or corrupt: a drafter is small, and a wrong one would only be slow, so its hashes
    are verified."""
    check_hashes(bundle, manifest, drafter_files(manifest, backend))
    graph = wrap("drafter", load_graph(bundle, manifest, "drafter", backend, threads))
    return Drafter(manifest, graph, bundle, target)


def drafter_files(manifest: Manifest, backend: str) -> tuple[str, ...]:
    head = manifest.drafter.centroid_head
    arrays = (head.table.data, head.table.scales, head.centroids, head.token_ordering) if head else ()
    return (*graph_files(manifest, "drafter", backend), *(array.file for array in arrays if array))
