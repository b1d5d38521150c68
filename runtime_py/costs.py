"""How many tokens to draft, learned while running: what a verify of r rows costs, what a draft costs, which drafts are
accepted. Pure functions over one frozen record; all times are seconds that the caller measured.

Of K drafts whose places are accepted with chances a1..aK a round makes 1 + a1 + a1 a2 + .. tokens in
verify(K + 1) + K * draft seconds. The K with the most tokens per second is taken, K = 0 included. What is learned fades,
so that it follows the text, the context and the machine. Losing is bounded twice: trying what looks worse is paid from
a credit of PROBE_SHARE of the time, and drafting that loses in fact, against plain decoding, soon uses up `guard`.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

MAX_DRAFT_TOKENS = 16

# Before anything is measured; the first rounds outweigh it
ROW_SHARE = 0.15  # of one row's time for each row more
DRAFT_SHARE = 0.06  # of one row's time for a drafted token
FIRST_CHANCE, NEXT_SHARE = 0.6, 0.95  # of the first draft; of a draft after one that was accepted, of the one before it

OUTER, STALE = 0.7, 0.3  # of the usual slope beyond the most rows of that weight: what looks cheap is tried, and known

TIME_CLIP = 1.5  # a measurement counts at most this factor off what was expected: the machine does other things too
LOSS_CLIP = 3.0  # the same, for what a round is thought to have lost: one that was held up is not the drafts' fault
TIME_SHARED = 0.05  # of its difference is taken to hold for any number of rows
TIME_KEPT, TIME_WEIGHT = 0.99, 30.0  # weight kept per round; most that a mean can have
CHANCE_KEPT, CHANCE_KEPT_IDLE = 0.98, 0.999  # weight kept per round of the source; per round in which it was not seen

PROBE_SHARE = 0.005  # of the time may be lost to probes, and to drafts that do not pay
PROBE_GAP = 5  # rounds between probes, at least
CREDIT, MAX_CREDIT = 1.0, 2.0  # at the start, at most; in tokens that plain decoding makes in the same time
GUARD, MAX_GUARD = 5.0, 30.0


class Mean(NamedTuple):
    """weight: how many measurements it is worth."""

    value: float
    weight: float


class Plan(NamedTuple):
    """source None: no drafts. probe: this is not what is expected to be fastest; loss: tokens expected to be lost by it."""

    source: str | None
    count: int
    probe: bool = False
    loss: float = 0.0


class Forecast(NamedTuple):
    """The best number of drafts above 0. speedup: against plain decoding."""

    source: str
    count: int
    tokens: float
    seconds: float
    speedup: float


@dataclass(frozen=True)
class Trial:
    """A round as it went. source None: none drafted. agreed: source -> how many of its drafts stand in the text, of how
    many that the round put to the test; also for what was proposed and not run."""

    plan: Plan
    drafted: int
    accepted: int
    tokens: int
    draft_s: float
    verify_s: float
    agreed: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Costs:
    """rows: T of a verify -> seconds. drafts: source -> seconds per draft. chances: source -> share accepted of the drafts
    at place 1, 2, .. that came after accepted ones. credit, guard: tokens (see the constants). since_probe: rounds."""

    rows: dict[int, Mean] = field(default_factory=dict)
    drafts: dict[str, Mean] = field(default_factory=dict)
    chances: dict[str, tuple[Mean, ...]] = field(default_factory=dict)
    credit: float = CREDIT
    guard: float = GUARD
    since_probe: int = 0


def verify_seconds(rows: dict[int, Mean]) -> list[float]:
    """Seconds of 1..MAX_DRAFT_TOKENS + 1 rows: a straight line through what was measured, drawn to each mean by its
    weight, never falling."""
    weight = sum(mean.weight for mean in rows.values())
    center = sum(mean.weight * r for r, mean in rows.items()) / weight
    level = sum(mean.weight * mean.value for mean in rows.values()) / weight
    spread = sum(mean.weight * (r - center) ** 2 for r, mean in rows.items())
    slope = sum(mean.weight * (r - center) * (mean.value - level) for r, mean in rows.items())
    one = rows[1].value if 1 in rows else level / (1 + ROW_SHARE * (center - 1))
    slope = (slope + ROW_SHARE * one) / (spread + 1)  # as if one measurement more had the usual slope
    seconds: list[float] = []
    widest = max(r for r, mean in rows.items() if mean.weight > STALE)
    for r in range(1, MAX_DRAFT_TOKENS + 2):
        line = level + slope * (min(r, widest) - center + OUTER * max(r - widest, 0))
        if mean := rows.get(r):
            line += mean.weight / (mean.weight + 1) * (mean.value - line)
        seconds.append(max(line, seconds[-1] if seconds else 0.0))
    return seconds


def expected_tokens(chances: tuple[Mean, ...], limit: int) -> list[float]:
    """Tokens of a round with 0..limit drafts. A place that was seen little is thought to be like the one before it."""
    tokens, reached, usual = [1.0], 1.0, FIRST_CHANCE
    for place in range(limit):
        share, weight = chances[place] if place < len(chances) else (0.0, 0.0)
        chance = (share * weight + usual) / (weight + 1)
        reached *= chance
        tokens.append(tokens[-1] + reached)
        usual = NEXT_SHARE * chance
    return tokens


def forecast(costs: Costs, offers: dict[str, int]) -> Forecast | None:
    """offers: source -> most drafts (at least 1). None before a round was measured or without offers."""
    if not costs.rows or not offers:
        return None
    verify = verify_seconds(costs.rows)
    found = []
    for source, limit in offers.items():
        measured = costs.drafts.get(source, Mean(0, 0))
        step = measured.value if measured.weight else DRAFT_SHARE * verify[0]
        for count, tokens in enumerate(expected_tokens(costs.chances.get(source, ()), limit)):
            seconds = verify[count] + count * step
            found.append(Forecast(source, count, tokens, seconds, tokens * verify[0] / seconds))
    return max((entry for entry in found if entry.count), key=lambda entry: entry.speedup)


def decide(costs: Costs, offers: dict[str, int]) -> Plan:
    """What to draft next; offers as for `forecast`. One row is measured first."""
    best = forecast(costs, offers)
    if best is None or 1 not in costs.rows:
        return Plan(None, 0)
    pays = best.speedup > 1 and costs.guard > 0
    planned = Plan(best.source, best.count) if pays else Plan(None, 0)
    if costs.since_probe < PROBE_GAP or not (pays or costs.guard > 0):
        return planned
    one = costs.rows[1]
    if pays:
        loss = 1 - 1 / best.speedup  # of a plain round among drafted ones
        return Plan(None, 0, True, loss) if costs.credit >= loss or one.weight < 1 else planned
    loss = best.seconds / one.value - best.tokens
    return Plan(best.source, best.count, True, loss) if loss <= min(costs.credit, costs.guard) else planned


def learn(costs: Costs, trial: Trial) -> Costs:
    """The record after a round."""
    rows = _learn_rows(costs.rows, trial.drafted + 1, trial.verify_s)
    drafts = costs.drafts
    if trial.drafted:
        drafts = {**drafts, trial.plan.source: _learn_draft(drafts.get(trial.plan.source), trial)}
    chances = {name: _fade(places, CHANCE_KEPT_IDLE) for name, places in costs.chances.items()}
    for name, (hits, tried) in trial.agreed.items():
        chances[name] = _learn_places(costs.chances.get(name, ()), hits, tried)
    usual = verify_seconds(rows)
    plain = rows[1].value if 1 in rows else usual[0]
    spent = (min(trial.verify_s, LOSS_CLIP * usual[trial.drafted]) + trial.draft_s) / plain
    gain = trial.tokens - spent if trial.drafted else 0.0
    paid = (gain if trial.drafted else -trial.plan.loss) if trial.plan.probe else 0.0
    return Costs(
        rows,
        drafts,
        chances,
        credit=min(costs.credit + PROBE_SHARE * spent + paid, MAX_CREDIT),
        guard=min(costs.guard + PROBE_SHARE * spent + gain, MAX_GUARD),
        since_probe=0 if trial.plan.probe else costs.since_probe + 1,
    )


def _learn_rows(rows: dict[int, Mean], count: int, seconds: float) -> dict[int, Mean]:
    expected = verify_seconds(rows)[count - 1] if rows else seconds
    factor = min(max(seconds / expected, 1 / TIME_CLIP), TIME_CLIP)
    shared = factor**TIME_SHARED
    rows = {r: Mean(mean.value * shared, mean.weight * TIME_KEPT) for r, mean in rows.items()}
    old = rows.get(count, Mean(expected, 0))
    return {**rows, count: _towards(old, expected * factor, TIME_WEIGHT)}


def _learn_draft(mean: Mean | None, trial: Trial) -> Mean:
    """A source's first draft only warms it up."""
    step = trial.draft_s / trial.drafted
    if mean is None or not mean.weight:
        return Mean(step, 0 if mean is None else 1)
    return _towards(mean, min(step, TIME_CLIP * mean.value), TIME_WEIGHT)


def _learn_places(places: tuple[Mean, ...], hits: int, tried: int) -> tuple[Mean, ...]:
    """Places that the round did not reach fade as fast as the others, so that they are tried again."""
    places = _fade(places, CHANCE_KEPT) + (Mean(0, 0),) * (tried - len(places))
    seen = (_towards(mean, float(i < hits)) for i, mean in enumerate(places[:tried]))
    return (*seen, *places[tried:])


def _towards(mean: Mean, value: float, most: float = float("inf")) -> Mean:
    weight = mean.weight + 1
    return Mean(mean.value + (value - mean.value) / weight, min(weight, most))


def _fade(places: tuple[Mean, ...], kept: float) -> tuple[Mean, ...]:
    return tuple(Mean(mean.value, mean.weight * kept) for mean in places)


def explain(costs: Costs, source: str) -> str | None:
    """Why nothing of `source` is drafted now; None where it is, or nothing was measured."""
    best = forecast(costs, {source: MAX_DRAFT_TOKENS})
    if best is None or (best.speedup > 1 and costs.guard > 0):
        return None
    verify = verify_seconds(costs.rows)
    means = (
        f"verify of {best.count + 1} rows costs {verify[best.count] / verify[0]:.1f}x, acceptance "
        f"{(best.tokens - 1) / best.count:.2f}"
    )
    if best.speedup > 1:
        return (
            f"drafting pauses: its last rounds took longer than plain decoding would have, against its means ({means}: "
            f"{best.speedup:.2f}x of plain); other programs may keep the machine busy"
        )
    return f"drafting does not pay: {means}, expected {best.speedup:.2f}x of plain"
