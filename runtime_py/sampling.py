"""Logits -> one token, greedy or sampled; names, meaning and order as in Transformers' `generate`.

Order: repetition penalty, the caller's hook, then (only when sampling) temperature, top_k, top_p, min_p, the draw.

The draw needs nothing but the seed and the token's position in the text, so a seed gives the same text however many
tokens are drafted, and other languages can repeat it. For position p (0 is the first token of the prompt):

    z = seed + (p + 1) * 0x9E3779B97F4A7C15            all in unsigned 64 bits: output p of SplitMix64(seed),
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9             which is java.util.SplittableRandom's nextLong()
    z = (z ^ z >> 27) * 0x94D049BB133111EB
    u = ((z ^ z >> 31) >> 11) * 2^-53                  in [0, 1)

Each token that is left weighs exp((logit - largest logit) / temperature) in double. In ascending order of token ids the
weights are added up one by one; the first token whose running sum exceeds u * (sum of all) is drawn.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .manifest import SamplingSpec

Array = np.ndarray
LogitsHook = Callable[[list[int], Array], Array]
"""(ids, logits [V]) -> logits [V]. ids: the text before the token, not to be changed; -inf forbids a token. It is called
once for each token of the text, whether that was drafted or not, and never for a rejected one."""

WORD = (1 << 64) - 1
LEAST, MOST = 1e-30, 1e30  # repetition penalty; a float32 logit divided by less, or multiplied by more, may overflow


@dataclass(frozen=True)
class Sampling:
    """Names as in Transformers' GenerationConfig. top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off, temperature
    0 is greedy. seed: only of use when sampling. ValueError names a value that cannot be."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0 <= self.temperature < math.inf, "it must be at least 0; 0 is greedy"),
            ("top_k", self.top_k >= 0, "it must be at least 0; 0 keeps every token"),
            ("top_p", 0 < self.top_p <= 1, "it must be above 0 and at most 1; 1 keeps every token"),
            ("min_p", 0 <= self.min_p <= 1, "it must be from 0 to 1; 0 keeps every token"),
            (
                "repetition_penalty",
                LEAST <= self.repetition_penalty <= MOST,
                "it must be above 0, from 1e-30 to 1e30; 1 is none",
            ),
            ("seed", 0 <= self.seed <= WORD, "it must be from 0 to 2^64 - 1"),
        )
        for name, good, remedy in checks:
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)}; {remedy}")

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0


GREEDY = Sampling()


def choose_sampling(
    defaults: SamplingSpec,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
) -> Sampling:
    """A bundle's defaults, changed by what is not None. Asking for a temperature or a filter asks for sampling;
    temperature 0 is greedy. Without a seed one is drawn."""
    asked = any(value is not None for value in (temperature, top_k, top_p, min_p))
    temperature = defaults.temperature if temperature is None else temperature
    return Sampling(
        do_sample=(defaults.do_sample or asked) and temperature != 0,
        temperature=temperature,
        top_k=defaults.top_k if top_k is None else top_k,
        top_p=defaults.top_p if top_p is None else top_p,
        min_p=0.0 if min_p is None else min_p,
        repetition_penalty=1.0 if repetition_penalty is None else repetition_penalty,
        seed=secrets.randbits(32) if seed is None else seed,
    )


class Sampler:
    """Chooses the tokens of one text; the text only grows between calls."""

    def __init__(self, sampling: Sampling, hook: LogitsHook | None = None):
        self._sampling, self._hook = sampling, hook
        self._seen: dict[int, None] = {}  # distinct ids of the text so far
        self._length = 0  # ids that _seen covers

    def __call__(self, ids: list[int], logits: Array) -> int:
        """ids: the whole text before the token; logits [V] of its last token. ValueError if they give no token."""
        if self._sampling.repetition_penalty != 1:
            self._seen |= dict.fromkeys(ids[self._length :])
            self._length = len(ids)
            logits = penalize(logits, list(self._seen), self._sampling.repetition_penalty)
        if self._hook:
            logits = self._hooked(ids, logits)
        best = int(logits.argmax())  # a NaN counts as the largest
        if not math.isfinite(logits[best]):
            raise ValueError(
                f"no token can be chosen at position {len(ids)}: the largest logit is {logits[best]}; "
                + ("the logits hook must leave a finite one" if self._hook else "the bundle's weights are damaged")
            )
        if self._sampling.greedy:
            return best
        return draw(*weigh(logits, self._sampling), uniform(self._sampling.seed, len(ids)))

    def _hooked(self, ids: list[int], logits: Array) -> Array:
        changed = np.asarray(self._hook(ids, logits.copy()))
        if changed.shape != logits.shape:
            raise ValueError(f"the logits hook gave shape {changed.shape}; it must keep {logits.shape}")
        return changed


def penalize(logits: Array, seen: list[int], penalty: float) -> Array:
    """A copy of logits [V], weaker at the ids of `seen`: divided where positive, multiplied where negative."""
    logits = logits.copy()
    values = logits[seen]
    logits[seen] = np.where(values < 0, values * penalty, values / penalty)
    return logits


def weigh(logits: Array, sampling: Sampling) -> tuple[Array, Array]:
    """logits [V] -> the ids that may be drawn, ascending, and their float64 weights (the largest is 1)."""
    ids = np.arange(len(logits))
    if 0 < sampling.top_k < len(logits):
        ids = np.flatnonzero(logits >= np.partition(logits, -sampling.top_k)[-sampling.top_k])  # ties stay
    values = logits[ids].astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature takes the difference to -inf: weight 0
        weights = np.exp((values - values.max()) / sampling.temperature)
    if sampling.top_p < 1:
        kept = _top_p(weights, sampling.top_p)
        ids, weights = ids[kept], weights[kept]
    kept = weights >= sampling.min_p
    return ids[kept], weights[kept]


def _top_p(weights: Array, top_p: float) -> Array:
    """Ascending indices of the tokens that stay: all but those that, with every smaller one, have at most 1 - top_p of
    the probability; of equal tokens the lower ids go first, one token always stays."""
    tail = (1 - top_p) * weights.sum()
    large = weights * len(weights) >= tail  # all the others together are within the tail, and need no sorting
    order = np.flatnonzero(large)
    order = order[np.argsort(weights[order], kind="stable")]
    removed = weights[~large].sum() + np.cumsum(weights[order]) <= tail
    removed[-1] = False
    return np.sort(order[~removed])


def draw(ids: Array, weights: Array, u: float) -> int:
    """The token at u in [0, 1) of the cumulative distribution."""
    sums = np.cumsum(weights)  # in order, one by one
    return int(ids[np.searchsorted(sums, u * sums[-1], side="right")])


def uniform(seed: int, position: int) -> float:
    """Output number `position` of SplitMix64(seed) as a double in [0, 1) with 53 bits."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return ((z ^ z >> 31) >> 11) / (1 << 53)
