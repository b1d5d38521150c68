"""Logits -> token: the processors are Transformers', the random numbers are SplitMix64's, and what cannot be is refused."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from runtime_py.manifest import SamplingSpec
from runtime_py.sampling import GREEDY, Sampler, Sampling, choose_sampling, draw, penalize, uniform, weigh

# The processors


def transformers_probabilities(ids: list[int], logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """As generate lists them: each only where its value does something."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.temperature != 1:
        processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    processors.append(MinPLogitsWarper(sampling.min_p))
    scores = processors(torch.tensor([ids]), torch.from_numpy(logits)[None].clone())
    return scores.softmax(-1)[0].numpy()


def probabilities(ids: list[int], logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    if sampling.repetition_penalty != 1:
        logits = penalize(logits, sorted(set(ids)), sampling.repetition_penalty)
    kept, weights = weigh(logits, sampling)
    found = np.zeros(len(logits))
    found[kept] = weights / weights.sum()
    return found


@settings(max_examples=400, deadline=None)
@given(
    data=st.data(),
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1, 2, 7, 100]),
    levels=st.sampled_from([None, 3]),
    temperature=st.sampled_from([0.05, 0.3, 1.0, 1.7, 10.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 99, 100, 1000]),
    top_p=st.sampled_from([1e-9, 0.1003, 0.5003, 0.9003, 0.9503, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    penalty=st.sampled_from([0.7, 1.0, 1.3]),
)
def test_probabilities_are_those_of_transformers(data, seed, size, levels, temperature, top_k, top_p, min_p, penalty):
    """levels: few different logits, so that ties are everywhere. Which of equal tokens top_p leaves out is torch.sort's
    choice, which is not stable: equal ones are compared as a group. No sum of theirs is exactly 1 - top_p."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, levels, size).astype(float) if levels else rng.normal(0, 3, size)
    if data.draw(st.booleans(), "masked") and size > 2:
        logits[rng.integers(0, size, size // 2)] = -np.inf
        logits[0] = 1.0
    ids = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20), "ids")
    sampling = Sampling(True, temperature, top_k, top_p, min_p, penalty)
    want = transformers_probabilities(ids, logits, sampling)
    found, scores = probabilities(ids, logits, sampling), penalize(logits, sorted(set(ids)), penalty)
    want, found = (part[np.lexsort((part, scores))] for part in (want, found))
    np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-12)


def test_a_tail_of_exactly_the_rest_is_left_out():
    logits, sampling = np.log([4, 2, 1, 1]), Sampling(True, top_p=0.5)
    assert probabilities([], logits, sampling).tolist() == [1, 0, 0, 0]
    assert transformers_probabilities([0], logits, sampling).tolist() == [1, 0, 0, 0]


def test_of_equal_tokens_the_lower_ids_go_first():
    assert probabilities([], np.zeros(10), Sampling(True, top_p=0.35)).nonzero()[0].tolist() == [6, 7, 8, 9]
    assert probabilities([], np.zeros(10), Sampling(True, top_p=0.25)).nonzero()[0].tolist() == [7, 8, 9]


def test_top_p_on_a_large_vocabulary_is_that_of_transformers():
    """where most tokens are left out without being sorted"""
    logits = np.random.default_rng(0).normal(0, 4, 50_000)
    for top_p in (0.3, 0.9, 0.95, 0.999):
        sampling = Sampling(True, top_p=top_p)
        want = transformers_probabilities([0], logits, sampling)
        np.testing.assert_allclose(probabilities([0], logits, sampling), want, rtol=1e-9, atol=1e-15)


def test_float32_penalty_is_bit_equal_to_transformers():
    logits = np.random.default_rng(0).normal(0, 3, 1000).astype(np.float32)
    ids = [1, 5, 5, 999, 0]
    want = RepetitionPenaltyLogitsProcessor(1.1)(torch.tensor([ids]), torch.from_numpy(logits)[None])[0].numpy()
    assert np.array_equal(penalize(logits, sorted(set(ids)), 1.1), want)


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-5])
def test_tiny_temperature_is_the_largest_logit(temperature):
    logits = np.array([1, 3, 2.9, 3], np.float32)
    ids, weights = weigh(logits, Sampling(True, temperature))
    assert set(ids[weights > 0]) == {1, 3}


def test_penalty_counts_each_id_of_prompt_and_text_once():
    sampler, logits = Sampler(Sampling(repetition_penalty=2.0)), np.array([4, 3, 2.5, 1.9], np.float32)
    ids = [0, 0, 0]
    assert sampler(ids, logits) == 1  # 2, 3, 2.5, 1.9
    ids += [1, 0]
    assert sampler(ids, logits) == 2  # 2, 1.5, 2.5, 1.9


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(True)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(sampling, bad):
    logits = np.array([0, 1, bad, 2], np.float32)
    with pytest.raises(
        ValueError, match=r"at position 3: the largest logit is (nan|inf); the bundle's weights are dama"
    ):
        Sampler(sampling)([5, 6, 7], logits)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, math.nan, math.inf)),
        ("top_k", -1),
        *(("top_p", value) for value in (0.0, -1.0, 1.001, math.nan)),
        *(("min_p", value) for value in (-0.1, 1.1, math.nan)),
        *(("repetition_penalty", value) for value in (0.0, -1.0, math.nan, math.inf)),
        *(("seed", value) for value in (-1, 1 << 64)),
    ],
)
def test_impossible_value_is_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name} is {re.escape(str(value))}; [^\n]+$"):
        Sampling(**{name: value})


@pytest.mark.parametrize("penalty", [1e-30, 1e30])
def test_bounds_of_the_penalty_are_possible(penalty):
    assert Sampling(repetition_penalty=penalty).repetition_penalty == penalty


def test_defaults_are_the_bundles():
    spec = SamplingSpec(True, 0.7, 64, 0.95)
    assert choose_sampling(spec, seed=5) == Sampling(True, 0.7, 64, 0.95, seed=5)
    assert choose_sampling(spec, temperature=0).greedy
    assert choose_sampling(spec, 1.5, 3, 0.5, 0.1, 1.2, 9) == Sampling(True, 1.5, 3, 0.5, 0.1, 1.2, 9)
    greedy = SamplingSpec(False, 1.0, 50, 1.0)
    assert choose_sampling(greedy, repetition_penalty=1.2).greedy
    assert not choose_sampling(greedy, top_p=0.9).greedy, "a filter asks for sampling"
    assert len({choose_sampling(spec).seed for _ in range(5)}) > 1


# The random numbers


def test_generator_is_splitmix64():
    """The published outputs for seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [uniform(1234567, position) for position in range(4)] == [(z >> 11) / 2**53 for z in published]


@pytest.mark.parametrize("top", [1.0, 1.9999999, 3.0, 0.1])
def test_largest_number_draws_a_token_with_weight(top):
    ids, weights = np.array([3, 5, 9, 11]), np.array([0.0, top, 0.25, 0.0])
    assert draw(ids, weights, 0.0) == 5
    assert draw(ids, weights, 1 - 2**-53) == 9
