"""Target: eager graphs == Transformers, .onnx files == eager on the same weights, runtime's ids == Transformers' ids.

Every check runs the runtime's own host code (tables, cache, masks, ring) and compares with Transformers recomputing the
whole sequence without a cache.
"""

from itertools import islice

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F

from export.graphs.layers import Linear
from export.quant import RECIPES, dequantize
from export.weights import open_drafter, token_ordering
from runtime_py.embeddings import EmbeddingTable
from runtime_py.graph_onnx import OnnxGraph
from runtime_py.manifest import CHUNK_ROWS, FULL, SLIDING
from runtime_py.models import TargetOutput
from runtime_py.speculative import prefill

from . import tolerances
from .conftest import BACKENDS
from .pairs import PairShape
from .reference import (
    Models,
    Transformers,
    acceptance,
    build,
    eager_graphs,
    eager_models,
    file_models,
    prompts_of,
    transformers_pair,
)

NEW_TOKENS = 64

DENSE_ODD = PairShape(
    kv_heads=2, hidden=96, intermediate=80, per_layer=48, drafter_hidden=48, window=16, layers=4, period=2, shared=2,
    centroids=None, softcap=None, double_wide=False,
)  # fmt: skip
SHAPES = {
    "tiny": "tiny",
    "default": PairShape(),
    "period 3": PairShape(kv_heads=2, layers=9, period=3, shared=3, window=16, per_layer=16, centroids=None),
    "donors apart": PairShape(
        kv_heads=2, query_heads=2, layers=6, period=3, shared=2, hidden=96, drafter_hidden=48, vocab=384, centroids=64
    ),
    "dense, odd widths": DENSE_ODD,
    "window over a chunk": PairShape(window=160, layers=4, period=2, shared=2),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.fixture(scope="module")
def eager_of(pair_of, tmp_path_factory):
    """shape -> eager models in float32 and Transformers."""
    made = {}

    def make(shape) -> tuple[Models, Transformers]:
        if shape not in made:
            pair = pair_of(shape)
            made[shape] = eager_models(pair, tmp_path_factory.mktemp("eager") / "tables"), transformers_pair(pair)
        return made[shape]

    return make


def random_ids(models: Models, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, models.manifest.target.vocab_size, count).tolist()


def calls_of(name: str, window: int) -> list[tuple[int, int]]:
    """(rows run, rows committed) of every target call."""
    verify = [(4, 1), (4, 3), (1, 1), (4, 4), (4, 2), (1, 1), (5, 1), (1, 1)]  # K + 1 rows, the call after a rejection
    return {
        "one by one": [(1, 1)] * min(3 * window + 1, 2 * CHUNK_ROWS - 2),
        "blocks of 3": [(3, 3)] * min(window + 1, CHUNK_ROWS // 3),
        "verify across the window": [*rows_to(window - 2), *verify],
        "verify past the window": [*rows_to(3 * window), *verify],
        "verify across a chunk's end": [*rows_to(CHUNK_ROWS - 4), (4, 2), (2, 1), (1, 1), *verify],
        "verify past three chunks": [*rows_to(3 * CHUNK_ROWS), *verify],
    }[name]


def rows_to(length: int) -> list[tuple[int, int]]:
    """Prefill: whole chunks, then the rest."""
    sizes = [CHUNK_ROWS] * (length // CHUNK_ROWS) + [length % CHUNK_ROWS]
    return [(size, size) for size in sizes if size]


CALLS = (
    "one by one",
    "blocks of 3",
    "verify across the window",
    "verify past the window",
    "verify across a chunk's end",
    "verify past three chunks",
)


def run_calls(models: Models, calls: list[tuple[int, int]], reference: Transformers | None = None) -> float:
    """Random tokens through the target -> largest |difference| from the reference, of logits and hidden, all rows."""
    cache, known, worst = models.new_cache(), [], 0.0
    ids = iter(random_ids(models, sum(rows for rows, _ in calls)))
    for rows, committed in calls:
        block = list(islice(ids, rows))
        output = models.target.forward(cache, block)
        if reference:
            want = reference.rows(known + block)
            for ours, theirs in ((output.logits, want.logits), (output.hidden, want.hidden)):
                worst = max(worst, np.abs(ours - theirs[len(known) :]).max())
        cache.commit(output.new.k, output.new.v, committed)
        known += block[:committed]
    return worst


@shapes
@pytest.mark.parametrize("calls", CALLS)
def test_eager_target_equals_transformers(eager_of, shape, calls):
    models, reference = eager_of(shape)
    calls = calls_of(calls, reference.window)
    assert run_calls(models, calls, reference) <= tolerances.EAGER


@shapes
def test_prefill_of_any_length_equals_transformers(eager_of, shape):
    """The runtime's own prefill: chunk by chunk, the cross-decoder on the last row only."""
    models, reference = eager_of(shape)
    window = reference.window
    ids = random_ids(models, 3 * max(window, CHUNK_ROWS), seed=1)
    for length in (1, window - 1, window, window + 1, 3 * window, CHUNK_ROWS, CHUNK_ROWS + 1, len(ids)):
        logits, hidden = prefill(models.target, models.new_cache(), ids[:length])
        want = reference.rows(ids[:length])
        assert np.abs(logits - want.logits[-1]).max() <= tolerances.EAGER
        assert np.abs(hidden - want.hidden[-1]).max() <= tolerances.EAGER


@shapes
def test_embedding_scale_is_that_of_the_checkpoints_dtype(eager_of, shape):
    models, reference = eager_of(shape)
    want = reference.target.get_input_embeddings().weight[:5] * reference.target.model.embed_tokens.embed_scale
    assert np.array_equal(models.target.embed(range(5)), want.detach().numpy())


def test_token_orderings_are_no_involutions(pair_of):
    """Else the inverse permutation would pass for the permutation."""
    for shape in SHAPES.values():
        drafter = open_drafter(str(pair_of(shape)[1]))
        if drafter.config.num_centroids:
            order = token_ordering(drafter)
            assert not (order[order] == order.sort().values).all()


class BothGraphs:
    """A file that is run beside an eager graph on the same inputs; keeps the largest difference of every output."""

    def __init__(self, file, eager):
        self._file, self._eager, self.worst, self.worst_in_deviations = file, eager, {}, {}

    def __call__(self, feeds):
        outputs, wanted = self._file(feeds), self._eager(feeds)
        for name, want in wanted.items():
            difference = np.abs(outputs[name] - want)
            self.worst[name] = max(self.worst.get(name, 0), difference.max())
            relative = np.sqrt((difference**2).mean()) / want.std()
            self.worst_in_deviations[name] = max(self.worst_in_deviations.get(name, 0), relative)
        return outputs


def run_both(models: Models, eager: dict) -> dict[str, BothGraphs]:
    """Prefill, decode, verify and drafts of the target and drafter, every call on file and eager graph."""
    graphs = {name: BothGraphs(graph, eager[name]) for name, graph in models.graphs.items()}
    both = build(models.manifest, models.bundle, graphs, models.backend)
    window = models.manifest.kv.window
    for calls in CALLS[1:]:
        run_calls(both, calls_of(calls, window))
    both.generate(random_ids(models, window - 2), 16, 3)
    return graphs


def float_activations(bundle, folder) -> Models:
    """The bundle's files with accuracy_level 0: onnxruntime dequantizes the packed weights and multiplies in float32."""
    models = file_models(bundle)
    graphs, changed = {}, 0
    for name, spec in models.manifest.graphs.items():
        model = onnx.load(bundle / spec.files["onnx"], load_external_data=False)
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i, changed = 0, changed + 1
        onnx.save(model, folder / f"{name}.onnx")
        (folder / f"{name}.onnx.data").hardlink_to(bundle / f"{spec.files['onnx']}.data")
        graphs[name] = OnnxGraph(folder / f"{name}.onnx", spec, threads=1)
    assert changed
    return build(models.manifest, bundle, graphs)


bundles = pytest.mark.parametrize("shape", ["tiny", DENSE_ODD], ids=["tiny", "odd"])
QUANTIZED = ("int8", "int4", "small")
# As .pte files, which take a while to lower: with odd widths a small one has every width of blocks there is.
LOWERED = [*(("tiny", recipe) for recipe in QUANTIZED), (DENSE_ODD, "small")]
backends = pytest.mark.parametrize("backend", BACKENDS)


@bundles
@backends
def test_float32_file_equals_eager(bundle_of, pair_of, shape, backend):
    graphs = run_both(file_models(bundle_of(shape, "fp32", backend)), eager_graphs(pair_of(shape), "fp32", backend))
    for graph in graphs.values():
        assert max(graph.worst.values()) <= tolerances.FILE, graph.worst


@bundles
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_packed_weights_equal_eager(bundle_of, pair_of, tmp_path, shape, recipe):
    """Without the rounding of activations a quantized file is exact: every packed block and scale is in its place."""
    graphs = run_both(float_activations(bundle_of(shape, recipe), tmp_path), eager_graphs(pair_of(shape), recipe))
    for graph in graphs.values():
        assert max(graph.worst.values()) <= tolerances.FILE, graph.worst


@pytest.mark.parametrize(("shape", "recipe"), LOWERED)
def test_packed_weights_equal_eager_with_the_same_activations(bundle_of, pair_of, shape, recipe, monkeypatch):
    """XNNPACK always rounds activations, to int8 per token; with the same rounding the eager graphs equal the file."""
    models = file_models(bundle_of(shape, recipe, "executorch"))
    monkeypatch.setattr(Linear, "forward", rounded_linear)
    monkeypatch.setattr(EmbeddingTable, "rows", rows_without_ties)
    graphs = run_both(models, eager_graphs(pair_of(shape), recipe, "executorch"))
    for name, graph in graphs.items():
        assert max(graph.worst_in_deviations.values()) <= tolerances.ROUNDED[name], graph.worst_in_deviations
    first = graphs["self_decoder"].worst_in_deviations
    assert max(first["new_k.0"], first["new_v.0"]) <= tolerances.ROUNDED_ONCE


TABLE_ROWS = EmbeddingTable.rows


def rows_without_ties(self: EmbeddingTable, ids: list[int]) -> np.ndarray:
    """Rows as the table has them but for up to 1 % in every column. Those of a 4-bit table lie on a lattice, so that after
    the first norm some stand exactly half-way between two int8 steps (up to 23 of a row, in 26 of 836 rows of the trained
    pair): there the last bit of a sum decides, which file and eager graph do not share."""
    return TABLE_ROWS(self, ids) * np.random.default_rng(0).uniform(0.99, 1.01, self.spec.columns).astype(np.float32)


def rounded_linear(self: Linear, x: torch.Tensor) -> torch.Tensor:
    """Activations as XNNPACK's qd8 operators take them: int8 with a scale and a zero point per token."""
    if not self.spec:
        return F.linear(x, self.weight)
    scale, zero = torch.ops.quantized_decomposed.choose_qparams_per_token_asymmetric(x, torch.int8)
    scale = scale.float()
    x = ((x / scale).round() + zero).clamp(-128, 127).sub(zero) * scale
    return F.linear(x, dequantize(self.weight, self.scale, self.spec.width(self.in_size)))


@pytest.mark.parametrize(
    ("backend", "shape", "recipe"),
    [("onnx", shape, recipe) for shape in ("tiny", DENSE_ODD) for recipe in QUANTIZED]
    + [("executorch", shape, recipe) for shape, recipe in LOWERED],
)
def test_quantized_file_is_near_eager(bundle_of, pair_of, shape, recipe, backend):
    """As shipped, activations in int8 per block or token: root mean square of the difference, in standard deviations."""
    graphs = run_both(file_models(bundle_of(shape, recipe, backend)), eager_graphs(pair_of(shape), recipe, backend))
    for name, graph in graphs.items():
        assert max(graph.worst_in_deviations.values()) <= tolerances.ACTIVATIONS[name], graph.worst_in_deviations


@backends
@pytest.mark.parametrize("drafts", [0, 3])
def test_ids_equal_transformers_on_the_trained_pair(bundle_of, pair_of, drafts, backend):
    """64 new tokens past the window of 32, against plain and assisted generation."""
    bundle, reference = bundle_of("tiny", "fp32", backend), transformers_pair(pair_of("tiny"))
    models = file_models(bundle)
    for prompt in prompts_of(bundle, 20):
        ids, _ = models.generate(prompt, NEW_TOKENS, drafts)
        assert ids == reference.plain(prompt, NEW_TOKENS)
        assert ids == reference.assisted(prompt, NEW_TOKENS, 3)[0]


@shapes
def test_ids_equal_transformers_on_random_pairs(eager_of, shape):
    models, reference = eager_of(shape)
    for seed, length in enumerate((1, reference.window, 2 * reference.window)):
        prompt = random_ids(models, length, seed)
        want = reference.plain(prompt, 24)
        assert want == reference.assisted(prompt, 24, 3)[0]
        for drafts in (0, 3):
            assert models.generate(prompt, 24, drafts)[0] == want


@backends
@pytest.mark.parametrize("calls", CALLS)
def test_random_pair_on_files_equals_transformers(bundle_of, pair_of, calls, backend):
    models, reference = file_models(bundle_of(DENSE_ODD, "fp32", backend)), transformers_pair(pair_of(DENSE_ODD))
    assert run_calls(models, calls_of(calls, reference.window), reference) <= tolerances.EAGER


@pytest.mark.parametrize(
    ("backend", "shape", "recipe"),
    [("onnx", shape, name) for shape in ("tiny", DENSE_ODD) for name, r in RECIPES["onnx"].items() if r.row_invariant]
    + [("executorch", shape, name) for shape, name in [*LOWERED, ("tiny", "fp32"), (DENSE_ODD, "fp32")]],
)
def test_a_row_has_the_same_bits_alone_and_in_blocks(bundle_of, shape, recipe, backend):
    """Every row of blocks of 2 to 8, at lengths before, at and past the window and the ends of chunks."""
    check_rows_alone_and_in_blocks(file_models(bundle_of(shape, recipe, backend)))


def check_rows_alone_and_in_blocks(models: Models) -> None:
    ids, window = random_ids(models, 400), models.manifest.kv.window
    for length in (0, 1, window - 1, window, 3 * window, CHUNK_ROWS - 8, CHUNK_ROWS, 160, 300, 3 * CHUNK_ROWS):
        cache, alone = models.new_cache(), []
        while cache.length < length:
            models.target.append(cache, ids[cache.length : min(length, cache.length + 8)])
        block = ids[length : length + 8]
        blocks = [rows_bits(models.target.forward(cache, block[:rows])) for rows in range(2, 9)]
        for token in block:
            output = models.target.forward(cache, [token])
            alone += rows_bits(output)
            cache.commit(output.new.k, output.new.v, 1)
        for rows in blocks:
            assert rows == alone[: len(rows)], (length, len(rows))


def rows_bits(output: TargetOutput) -> list[bytes]:
    """All that comes out of each row."""
    parts = (output.logits, output.hidden, output.new.x, *output.new.k, *output.new.v)
    return [b"".join(part[row].tobytes() for part in parts) for row in range(len(output.logits))]


@backends
@pytest.mark.parametrize("recipe", ["fp32", "int8", "int4", "small"])
def test_drafted_ids_equal_plain_ids(bundle_of, recipe, backend):
    """K = 1..8, some 3,000 tokens: enough that keys which move within a sum change a text (about one in 15)."""
    assert compare_with_plain_ids(file_models(bundle_of("tiny", recipe, backend)), 6) >= 2000


def compare_with_plain_ids(models: Models, prompts: int) -> int:
    """-> tokens compared"""
    compared = 0
    for prompt in prompts_of(models.bundle, prompts):
        plain, _ = models.generate(prompt, NEW_TOKENS, 0)
        for drafts in range(1, 9):
            assert models.generate(prompt, NEW_TOKENS, drafts)[0] == plain
            compared += len(plain)
    return compared


@shapes
def test_the_first_token_is_seen_past_three_windows(eager_of, shape):
    models, reference = eager_of(shape)
    ids = random_ids(models, 3 * reference.window, seed=5)
    other = [ids[0] ^ 1, *ids[1:]]
    mine, changed = (prefill(models.target, models.new_cache(), text)[0] for text in (ids, other))
    assert np.abs(mine - changed).max() >= tolerances.NEEDLE
    assert np.abs(changed - reference.rows(other).logits[-1]).max() <= tolerances.EAGER


@shapes
@pytest.mark.parametrize("closed_chunks", [0, 1])
def test_full_layers_see_all_rows_and_sliding_layers_their_window(eager_of, shape, closed_chunks):
    """Rows of the cache are overwritten one at a time; the position that the window has just left changes no bit."""
    models, reference = eager_of(shape)
    window = reference.window
    length = CHUNK_ROWS * max(closed_chunks, window // CHUNK_ROWS) + (window // 2 if closed_chunks else window + 1)
    ids = random_ids(models, length + 4, seed=6)
    cache = models.new_cache()
    prefill(models.target, cache, ids[:length])
    want = models.target.forward(cache, ids[length:]).logits

    def change(layer: int, kind: str, position: int) -> tuple[float, float]:
        """of the logits of the first row, of all rows"""
        if position >= cache.start:
            row = cache.tail(layer, kind)[1][position - cache.start]
        else:
            row = cache.past(layer, kind)[1][position % window if kind == SLIDING else position]
        kept = row.copy()
        row += 10
        logits = models.target.forward(cache, ids[length:]).logits
        row[:] = kept
        return float(np.abs(logits[0] - want[0]).max()), float(np.abs(logits - want).max())

    for layer in models.manifest.kv.layers:
        if layer.type == SLIDING:
            if length - window >= max(0, cache.start - window):  # still held, in the ring or the open chunk
                assert change(layer.layer, SLIDING, length - window)[1] == 0
            assert change(layer.layer, SLIDING, length - window + 1)[0] > 0
        else:
            assert change(layer.layer, FULL, 0)[0] > 0
            assert change(layer.layer, FULL, length - 1)[0] > 0


@backends
def test_int8_accepts_as_many_drafts_as_float32(bundle_of, backend):
    """Held-out prompts, K = 3; per place in the block, and over all."""
    found = {}
    for recipe in ("fp32", "int8"):
        bundle = bundle_of("tiny", recipe, backend)
        models = file_models(bundle)
        rounds = [entry for prompt in prompts_of(bundle, 40) for entry in models.generate(prompt, NEW_TOKENS, 3)[1]]
        found[recipe] = acceptance(rounds)
    assert all(have >= floor for have, floor in zip(found["int8"].places, tolerances.ACCEPTANCE_PLACES, strict=True))
    assert found["int8"].overall >= tolerances.ACCEPTANCE
    assert abs(found["int8"].overall - found["fp32"].overall) <= tolerances.ACCEPTANCE_LOST_TO_INT8


@backends
def test_the_smallest_recipe_keeps_accepting_drafts(bundle_of, backend):
    """4 bits cost a model of 2 M parameters far more than one of 2 B: a floor, not a promise."""
    bundle = bundle_of("tiny", "small", backend)
    models = file_models(bundle)
    rounds = [entry for prompt in prompts_of(bundle, 40) for entry in models.generate(prompt, NEW_TOKENS, 3)[1]]
    places = acceptance(rounds).places
    assert all(have >= floor for have, floor in zip(places, tolerances.SMALL_ACCEPTANCE_PLACES, strict=True)), places


@pytest.mark.parametrize("drafts", [0, 3])
def test_both_backends_give_the_same_ids_and_drafts(bundle_of, drafts):
    """float32, 20 held-out prompts; the drafted tokens one by one."""
    found = []
    for backend in BACKENDS:
        bundle = bundle_of("tiny", "fp32", backend)
        models = file_models(bundle)
        ids = [models.generate(prompt, NEW_TOKENS, drafts)[0] for prompt in prompts_of(bundle, 20)]
        found.append((ids, [entry.drafts for entry in models.drafter.rounds]))
    assert found[0] == found[1]
