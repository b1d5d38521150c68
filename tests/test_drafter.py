"""Drafter: every step equals Transformers' assistant on committed rows, and its stale-row drafts are reproduced one by one."""

import numpy as np
import pytest
import torch

from runtime_py.manifest import CHUNK_ROWS

from . import tolerances
from .pairs import PairShape
from .reference import (
    HfParityCache,
    HfParityDrafter,
    Models,
    Transformers,
    acceptance,
    build,
    check_steps,
    eager_models,
    file_models,
    prompts_of,
    transformers_pair,
)
from .test_parity import DENSE_ODD

NEW_TOKENS = 64
CENTROIDS_ODD = PairShape(
    kv_heads=2, query_heads=2, layers=6, period=3, shared=2, hidden=96, drafter_hidden=48, vocab=384, centroids=64
)
SHAPES = {"default": PairShape(), "centroids, odd widths": CENTROIDS_ODD, "dense, odd widths": DENSE_ODD}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.fixture(scope="module")
def pair_with_reference(pair_of, tmp_path_factory):
    """shape -> eager models in float32 and Transformers."""

    def make(shape: PairShape) -> tuple[Models, Transformers]:
        pair = pair_of(shape)
        return eager_models(pair, tmp_path_factory.mktemp("eager") / "tables"), transformers_pair(pair)

    return make


@shapes
def test_steps_equal_the_assistant(pair_with_reference, shape):
    """Three steps after prefill, after partial, no and full acceptance, before and past the window."""
    models, reference = pair_with_reference(shape)
    random = np.random.default_rng(3)
    cache, known = models.new_cache(), []
    for rows, committed in [(3, 3), (4, 2), (4, 4), (4, 1), (4, 3), (6, 6), (4, 2), (8, 8), (4, 1), (8, 8), (4, 3)]:
        block = random.integers(3, shape.vocab, rows).tolist()
        output = models.target.forward(cache, block)
        cache.commit(output.new.k, output.new.v, committed)
        known += block[:committed]
        pending = int(random.integers(3, shape.vocab))
        models.drafter.draft(cache, pending, output.hidden[committed - 1], 3)
        found = check_steps(reference, [*known, pending], models.drafter.rounds[-1])
        assert found.worst <= tolerances.DRAFTER
        assert found.same_drafts
    assert cache.length > shape.window + 4


def test_steps_of_the_trained_pair_equal_the_assistant(bundle_of, pair_of):
    """In whole generations: float32 files, real acceptance, a prompt and 64 tokens past the window of 32."""
    bundle, reference = bundle_of("tiny", "fp32"), transformers_pair(pair_of("tiny"))
    models, partial, past_window = file_models(bundle), 0, 0
    for prompt in prompts_of(bundle, 4):
        models.drafter.rounds.clear()
        ids, rounds = models.generate(prompt, NEW_TOKENS, 3)
        for entry in models.drafter.rounds:
            found = check_steps(reference, (prompt + ids)[: entry.tokens], entry)
            assert found.worst <= tolerances.DRAFTER
            assert found.same_drafts
        partial += sum(0 < entry.accepted < entry.drafted for entry in rounds)
        past_window += sum(entry.tokens > reference.window for entry in models.drafter.rounds)
    assert min(partial, past_window) >= 5


@shapes
def test_stale_rows_reproduce_the_drafts_of_random_pairs(pair_with_reference, shape):
    """Random drafts are all rejected, so that every round but the first has stale rows."""
    models, reference = pair_with_reference(shape)
    models = build(models.manifest, models.bundle, models.graphs, drafter=HfParityDrafter, cache=HfParityCache)
    for length in (1, 10, 3 * shape.window + 1):
        prompt = np.random.default_rng(length).integers(3, shape.vocab, length).tolist()
        models.drafter.rounds.clear()
        models.generate(prompt, 24, 3)
        assert [entry.drafts for entry in models.drafter.rounds] == reference.assisted(prompt, 24, 3)[1]


def test_stale_rows_reproduce_the_drafts_of_the_trained_pair(bundle_of, pair_of):
    """One by one over generations past the window, up to the end of the first chunk, where a block of ours is cut and
    one of Transformers is not; the drafter that sees committed rows only is accepted at least as often."""
    bundle, reference = bundle_of("tiny", "fp32"), transformers_pair(pair_of("tiny"))
    models = file_models(bundle)
    stale = build(models.manifest, bundle, models.graphs, drafter=HfParityDrafter, cache=HfParityCache)
    stale_rounds, rounds, drafts, committed_drafts = [], [], [], []
    for prompt in prompts_of(bundle, 20):
        new_tokens = min(NEW_TOKENS, CHUNK_ROWS - len(prompt))
        stale.drafter.rounds.clear()
        stale_rounds += stale.generate(prompt, new_tokens, 3)[1]
        drafts += [entry.drafts for entry in stale.drafter.rounds]
        assert [entry.drafts for entry in stale.drafter.rounds] == reference.assisted(prompt, new_tokens, 3)[1]
        models.drafter.rounds.clear()
        rounds += models.generate(prompt, new_tokens, 3)[1]
        committed_drafts += [entry.drafts for entry in models.drafter.rounds]
    assert drafts != committed_drafts  # else the stale rows would not matter
    assert acceptance(rounds).overall >= acceptance(stale_rounds).overall


@pytest.mark.parametrize("shape", [PairShape(), CENTROIDS_ODD], ids=["default", "odd widths"])
def test_centroid_head_equals_transformers(pair_with_reference, shape):
    """Candidate ids and logits; Transformers gives every other token the least selected logit less 1."""
    models, reference = pair_with_reference(shape)
    embedder, weight = reference.drafter.masked_embedding, reference.drafter.lm_head.weight
    for hidden in np.random.default_rng(7).standard_normal((16, shape.drafter_hidden)).astype(np.float32):
        ids, logits = models.drafter._head.candidates(hidden)
        with torch.inference_mode():
            want = embedder(torch.from_numpy(hidden)[None, None], weight)[0, 0].numpy()
        assert set(ids.tolist()) == set(np.flatnonzero(want > want.min()).tolist())
        assert len(ids) == shape.top_k * shape.vocab // shape.centroids
        assert np.abs(want[ids] - logits).max() <= tolerances.DRAFTER
        assert models.drafter._head(hidden) == want.argmax()


@shapes
def test_drafter_sees_all_committed_rows(pair_with_reference, shape):
    """Every row of the sliding donor's window and row 0 of the full donor change what is drafted from."""
    models, _ = pair_with_reference(shape)
    cache, ids = models.new_cache(), np.random.default_rng(8).integers(3, shape.vocab, 3 * shape.window).tolist()
    while cache.length < len(ids):
        models.target.append(cache, ids[cache.length : cache.length + shape.window])
    state = np.ones((1, shape.hidden), np.float32)

    def drafted() -> np.ndarray:
        return models.drafter.step(models.drafter.block_inputs(cache), 5, state)[1]

    models.drafter.draft(cache, 5, state[0], 1)
    want = drafted()
    for kind, rows in (("sliding", range(shape.window)), ("full", (0, len(ids) - 1))):
        for row in rows:
            values = cache.donor_rows(kind)[1][row]
            kept = values.copy()
            values += 10
            assert np.abs(drafted() - want).max() > 0
            values[:] = kept
