"""A text drafted and verified has the distribution of one drawn token by token, seeds and hooks give the same text however
many tokens are drafted, and the tests of that can fail."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import chi2

from runtime_py import speculative
from runtime_py.cache import KVCache
from runtime_py.drafting import DraftPolicy
from runtime_py.models import NewRows, TargetOutput
from runtime_py.sampling import GREEDY, Sampler, Sampling, weigh
from runtime_py.speculative import generate

from .doubles import GROUP, TOKENS, Script, ScriptedDrafter, ScriptedTarget, kv_spec
from .test_sampling import transformers_probabilities

# A chain with known transition probabilities

V, DRAFTS, DRAWS = 7, 3, 20_000
CASES = {
    "T 0.3": Sampling(True, 0.3, top_k=5, top_p=0.95),
    "T 1.0": Sampling(True, 1.0, top_k=5, top_p=0.95),
}
LOGITS = np.random.default_rng(3).normal(0, 0.6, (V, V)).astype(np.float32)  # of the next token, by the last one
FAIR, UNFAIR = 1e-3, 1e-9  # p of a chi-square test; the seeds are fixed


def transitions(sampling: Sampling) -> np.ndarray:
    return np.array([transformers_probabilities([0], row.astype(float), sampling) for row in LOGITS])


class ChainTarget:
    """Stands for models.Target; keys and values mean nothing."""

    spec = SimpleNamespace(vocab_size=V)

    def forward(self, cache, ids, last_row_only=False):
        rows = ids[-1:] if last_row_only else ids
        kv = np.zeros((len(ids), 1, 2), np.float32)
        return TargetOutput(LOGITS[rows], np.zeros((len(rows), 1)), NewRows(kv, [kv, kv], [kv, kv]))


class ArgmaxDrafter:
    """The best token after each, as an MTP drafter would."""

    def draft(self, cache, token, hidden, count):
        drafts = []
        for _ in range(count):
            token = int(LOGITS[token].argmax())
            drafts.append(token)
        return drafts


def chain(sampling: Sampling, tokens: int, drafts: int = DRAFTS) -> tuple[list[int], list]:
    ids = [0]
    drafter = ArgmaxDrafter() if drafts else None
    cache = KVCache(kv_spec(8, 128), GROUP, tokens + 1)
    tokens_spec = replace(TOKENS, eos=())
    rounds = list(generate(ChainTarget(), drafter, cache, ids, tokens, tokens_spec, DraftPolicy(drafts), sampling))
    return ids, rounds


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of a chi-square test over all cells of any shape [groups, cells]; each group has the total that it has."""
    total, freedom = 0.0, 0
    for seen, share in zip(counts, expected, strict=True):
        if seen.sum() >= 200:
            assert not seen[share == 0].any(), "a token that no distribution allows"
            want = share[share > 0] * seen.sum()
            total += ((seen[share > 0] - want) ** 2 / want).sum()
            freedom += len(want) - 1
    assert freedom
    return float(chi2.sf(total, freedom))


def place_p_values(sampling: Sampling) -> list[float]:
    """One long text: the tokens at every place of a block, given the token before them."""
    ids, rounds = chain(sampling, DRAWS * 2)
    counts, position = np.zeros((DRAFTS + 1, V, V), int), 1
    for entry in rounds:
        for place, token in enumerate(entry.tokens):
            counts[place, ids[position - 1], token] += 1
            position += 1
    share = transitions(sampling)
    return [p_value(counts[place], share) for place in range(DRAFTS + 1)]


def pair_p_values(sampling: Sampling) -> list[float]:
    """Many seeds: the tokens at two neighbouring positions of a text, both within its first block of drafts, or not."""
    share, counts = transitions(sampling), np.zeros((3, V, V), int)
    for seed in range(DRAWS):
        ids, _ = chain(Sampling(True, sampling.temperature, sampling.top_k, sampling.top_p, seed=seed), 4)
        for first in range(3):
            counts[first, ids[first + 1], ids[first + 2]] += 1
    marginal, found = share[0], []
    for first in range(3):
        found.append(p_value(counts[first].reshape(1, -1), (marginal[:, None] * share).reshape(1, -1)))
        marginal = marginal @ share
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_place_of_a_block_has_the_distribution_of_plain_sampling(case):
    assert min(place_p_values(CASES[case])) > FAIR


@pytest.mark.parametrize("case", CASES)
def test_pairs_of_positions_have_the_distribution_of_plain_sampling(case):
    assert min(pair_p_values(CASES[case])) > FAIR


def biased_accept(ids, drafts, logits, sampler, eos):
    """Speculative sampling as if the drafter's best token had been drawn from its softmax: it is accepted with
    min(1, p / q), and a rejected one is drawn anew from what p has more than q."""
    start, rng = len(ids), np.random.default_rng(len(ids))
    for place, row in enumerate(logits):
        kept, weights = weigh(row, sampler._sampling)
        p = np.zeros(V)
        p[kept] = weights / weights.sum()
        if place == len(drafts):
            ids.append(int(rng.choice(V, p=p)))
            break
        q = np.exp(LOGITS[ids[-1]] - LOGITS[ids[-1]].max())
        q /= q.sum()
        if rng.random() < p[drafts[place]] / q[drafts[place]]:
            ids.append(drafts[place])
            continue
        rest = np.maximum(p - q, 0)
        ids.append(int(rng.choice(V, p=rest / rest.sum())))
        break
    return len(ids) - start, min(place, len(drafts))


def test_accepting_the_best_token_as_if_it_were_drawn_fails(monkeypatch):
    monkeypatch.setattr(speculative, "accept", biased_accept)
    assert min(place_p_values(CASES["T 1.0"])) < UNFAIR


@pytest.mark.parametrize("case", CASES)
def test_a_seed_gives_one_text_for_every_number_of_drafts(case):
    sampling = CASES[case]
    plain = chain(sampling, 200, 0)[0]
    for count in range(1, 8):
        ids, rounds = chain(sampling, 200, count)
        assert ids == plain
        assert sum(entry.accepted for entry in rounds) > 0
    others = {tuple(chain(Sampling(True, seed=seed), 50)[0]) for seed in range(20)}
    assert len(others) == 20


# The hook


class DateMask:
    """Constrains a text to 2026-[01][0-9]-[0-3][0-9], whatever the model would rather write: token = character code."""

    shape = ("2", "0", "2", "6", "-", "01", "0123456789", "-", "0123", "0123456789")

    def __init__(self, prompt: int):
        self.prompt, self.positions = prompt, []

    def __call__(self, ids: list[int], logits: np.ndarray) -> np.ndarray:
        self.positions.append(len(ids))
        allowed = [ord(c) for c in self.shape[len(ids) - self.prompt]]
        masked = np.full_like(logits, -np.inf)
        masked[allowed] = logits[allowed]
        return masked


class MaskedScript(Script):
    """Writes what the mask leaves of a hash, so that a scripted drafter can be right."""

    def next_token(self, full, sliding):
        choices = DateMask.shape[min(len(full) - 5, 9)] if len(full) >= 5 else "x"
        return ord(choices[super().next_token(full, sliding) % len(choices)])


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(True, seed=4)], ids=["greedy", "sampled"])
def test_masked_text_has_its_shape_and_is_the_same_with_drafts(sampling):
    prompt, texts = [2, 50, 60, 70, 80], []
    for count in (0, 1, 4):
        script, ids, mask = MaskedScript(), list(prompt), DateMask(len(prompt))
        target, drafter = ScriptedTarget(script), ScriptedDrafter(script, lambda block: block % 5)
        policy = DraftPolicy(count)
        rounds = list(generate(target, drafter, target.new_cache(), ids, 10, TOKENS, policy, sampling, mask))
        texts.append("".join(map(chr, ids[5:])))
        assert mask.positions == list(range(5, 15)), "once for every token of the text, in order"
        assert count == 0 or sum(entry.accepted for entry in rounds) > 0
    assert re.fullmatch(r"2026-[01]\d-[0-3]\d", texts[0])
    assert len(set(texts)) == 1


def test_hook_comes_after_the_penalty_and_before_the_filters():
    seen = []

    def hook(ids, logits):
        seen.append(logits.tolist())
        return np.array([0, 5, 0, 5.0])

    sampling = Sampling(True, top_k=1, repetition_penalty=2.0)
    assert {Sampler(sampling, hook)([0] * n, np.array([4, -2, 0, 1.0])) for n in range(1, 40)} == {1, 3}
    assert seen[0] == [2, -2, 0, 1]


@pytest.mark.parametrize(
    ("result", "message"),
    [(np.full(4, -np.inf), "the logits hook must leave a finite one"), (np.zeros(3), r"gave shape \(3,\)")],
)
def test_hook_that_leaves_no_choice_is_refused_and_the_text_stays(result, message):
    script = Script()
    target, ids = ScriptedTarget(script), [2, 5]

    def hook(text, logits):
        return logits if len(text) < 5 else np.resize(result, len(logits)) if len(result) == 4 else result

    cache, drafter = target.new_cache(), ScriptedDrafter(script, lambda block: 9)
    with pytest.raises(ValueError, match=message):
        list(generate(target, drafter, cache, ids, 9, TOKENS, DraftPolicy(4), GREEDY, hook))
    assert ids == [2, 5, *script.reference([2, 5], 1)], "nothing of the round that failed"
