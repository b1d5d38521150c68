"""A machine and a text made of numbers, to see what the automatic draft length would have lost or won.

A scenario is a sequence of phases. Its costs come from measured tables, a chance per place decides what is accepted, and
what the policy is told of a time carries noise and outliers; throughput is counted in the true times.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from runtime_py.costs import MAX_DRAFT_TOKENS, Costs, Trial, decide, learn

# Milliseconds of a verify of so many rows, measured on E2B's sizes with 2 cores
TABLES = {
    "onnxruntime int8 block 64": {1: 50, 4: 79, 5: 89, 8: 114},
    "onnxruntime int8 block 128": {1: 61, 4: 79, 5: 82, 8: 101},
    "onnxruntime int8 per row": {1: 59, 4: 77, 5: 84, 8: 94},
    "onnxruntime int4 block 32": {1: 45, 4: 65, 5: 75, 8: 103},
    "onnxruntime int4 block 128": {1: 34, 4: 51, 5: 58, 8: 77},
    "XNNPACK int8": {1: 56, 4: 65, 5: 68, 8: 81},
    "XNNPACK 4 bit": {1: 35, 4: 48, 5: 50, 8: 64},
    "llama.cpp 4 bit": {1: 69, 4: 165},
}


@dataclass(frozen=True)
class Phase:
    """chances(place): that a draft is accepted after accepted ones. growth: how much slower the phase ends than it begins.
    scale: of all times. repeats: share of the rounds in which lookup has a match, right at `lookup` per place."""

    tokens: int
    table: dict[int, float]
    chances: Callable[[int], float]
    growth: float = 0.0
    scale: float = 1.0
    repeats: float = 0.0
    lookup: float = 0.0
    draft_share: float = 0.06  # of one row's time

    def verify(self, rows: int) -> float:
        """Straight between the rows of the table and beyond them."""
        known = sorted(self.table)
        low = max(r for r in known[:-1] if r <= rows)
        high = known[known.index(low) + 1]
        slope = (self.table[high] - self.table[low]) / (high - low)
        return self.scale * (self.table[low] + slope * (rows - low))

    def round_seconds(self, count: int, source: str = "mtp") -> float:
        step = self.draft_share * self.verify(1) if source == "mtp" else 0.0
        return self.verify(count + 1) + count * step


def same(chance: float) -> Callable[[int], float]:
    return lambda place: chance


def fixed_seconds(phases: list[Phase], count: int) -> float:
    """Expected seconds of the text with always `count` drafts of the model."""
    total = 0.0
    for phase in phases:
        reached, tokens = 1.0, 1.0
        for place in range(count):
            reached *= phase.chances(place)
            tokens += reached
        total += phase.tokens * phase.round_seconds(count) / tokens * (1 + phase.growth / 2)
    return total


@dataclass(frozen=True)
class Outcome:
    """seconds: true ones; counts: drafts -> rounds; probes: seconds of the rounds that were probes."""

    seconds: float
    counts: dict[int, int]
    probe_seconds: float
    costs: Costs


def simulate(phases: list[Phase], seed: int, noise: float = 0.1, outliers: float = 0.01) -> Outcome:
    rng, costs, total, probes, counts = random.Random(seed), Costs(), 0.0, 0.0, {}
    curves = [([p.verify(r) for r in range(1, MAX_DRAFT_TOKENS + 2)], p.draft_share * p.verify(1)) for p in phases]

    def told(seconds: float) -> float:
        return seconds * math.exp(rng.gauss(0, noise)) * (3 if rng.random() < outliers else 1)

    for phase, (curve, step) in zip(phases, curves, strict=True):
        left = phase.tokens
        while left:
            limit = min(MAX_DRAFT_TOKENS, left - 1)
            match = rng.random() < phase.repeats
            offers = {"mtp": limit, **({"ngram4": limit} if match else {})} if limit else {}
            plan = decide(costs, offers)
            right = {"mtp": phase.chances, "ngram4": same(phase.lookup)}
            hits = {source: _hits(rng, right[source], limit) for source in offers}
            accepted = min(hits[plan.source], plan.count) if plan.source else 0
            slower = 1 + phase.growth * (1 - left / phase.tokens)
            verify = curve[plan.count] * slower
            draft = plan.count * step * slower if plan.source == "mtp" else 0.0
            agreed = {"mtp": (accepted, min(accepted + 1, plan.count))} if plan.source == "mtp" else {}
            if match:
                tokens = accepted + 1  # compared with the lookup's, whether they were run or not
                agreed["ngram4"] = (min(hits["ngram4"], tokens), min(hits["ngram4"] + 1, tokens))
            trial = Trial(plan, plan.count, accepted, accepted + 1, told(draft), told(verify), agreed)
            costs = learn(costs, trial)
            total += verify + draft
            probes += (verify + draft) * plan.probe
            counts[plan.count] = counts.get(plan.count, 0) + 1
            left -= accepted + 1
    return Outcome(total, counts, probes, costs)


def _hits(rng: random.Random, chances: Callable[[int], float], limit: int) -> int:
    hits = 0
    while hits < limit and rng.random() < chances(hits):
        hits += 1
    return hits


def scenarios(table: dict[int, float], tokens: int) -> dict[str, list[Phase]]:
    """One machine with texts of every kind."""
    half, sixth = tokens // 2, tokens // 6
    made = {f"acceptance {chance}": [Phase(tokens, table, same(chance))] for chance in (0.1, 0.3, 0.5, 0.7, 0.9)}
    good, bad = Phase(half, table, same(0.8)), Phase(half, table, same(0.15))
    return made | {
        "good, then bad": [good, bad],
        "bad, then good": [bad, good],
        "six times changing": [replace(phase, tokens=sixth) for phase in (good, bad) * 3],
        "growing context": [Phase(tokens, table, same(0.6), growth=0.25)],
        "slower machine in the middle": [Phase(half, table, same(0.5)), Phase(half, table, same(0.5), scale=1.6)],
        "deeper drafts worse": [Phase(tokens, table, lambda place: max(0.2, 0.8 - 0.15 * place))],
    }


def published(rows_share: float, draft_share: float, speedup: float, count: int = 3) -> Phase:
    """A phase whose constant chance makes `count` drafts give a published speed-up. rows_share: time of count + 1 rows."""
    table = {1: 1.0, count + 1: rows_share}
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        phase = Phase(3000, table, same(middle), draft_share=draft_share)
        gain = fixed_seconds([phase], 0) / fixed_seconds([phase], count)
        low, high = (middle, high) if gain < speedup else (low, middle)
    return phase
