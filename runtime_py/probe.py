"""What drafting costs on this machine: rows of a block against rows alone, seconds per verify and draft, a verdict.

A verify of K + 1 rows and K drafts make 1 + a + a^2 + .. + a^K tokens where each draft is accepted with chance a. That pays
where it is more than their cost, counted in decodes of one token.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from .cache import KVCache
from .costs import FIRST_CHANCE, MAX_DRAFT_TOKENS
from .models import Drafter, Target

CONTEXT_TOKENS = 160  # rows before the block
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 9, 13, 17)
DRAFTS = 4  # tokens of a draft that is timed
MIN_REPEATS, MAX_REPEATS, BUDGET_S = 5, 60, 3.0  # of each cost: short calls are measured more often
BUSY = 1.5  # upper quartile of a cost over its lower one
BUSY_NOTE = "note: times vary, other programs may keep the machine busy; measure again when it is idle"
Clock = Callable[[], float]


class Quartiles(NamedTuple):
    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Probe:
    """verify_s: rows of a call -> seconds; draft_s: of one drafted token, None without a drafter. The rest compares each
    row of the blocks with the same token run alone."""

    context_tokens: int
    repeats: int
    rows_compared: int
    max_logit_difference: float
    argmax_flips: int
    verify_s: dict[int, Quartiles]
    draft_s: Quartiles | None

    def ratios(self) -> dict[int, float]:
        """Rows of a call -> in decodes of one token. By the lower quartiles, and no call is held to cost more than one of
        more rows: other programs only add time."""
        rows = self.verify_s
        least = {count: min(entry.low for other, entry in rows.items() if other >= count) for count in rows}
        return {count: value / least[1] for count, value in least.items()}

    def draft_ratio(self) -> float:
        """A drafted token in decodes; 0 without a drafter."""
        return self.draft_s.low / min(entry.low for entry in self.verify_s.values()) if self.draft_s else 0.0

    def costs(self) -> dict[int, float]:
        """K -> a round of K drafts, in decodes of one token."""
        return {rows - 1: ratio + (rows - 1) * self.draft_ratio() for rows, ratio in self.ratios().items()}

    @property
    def busy(self) -> bool:
        measured = [*self.verify_s.values(), *([self.draft_s] if self.draft_s else [])]
        return any(entry.high > BUSY * entry.low for entry in measured)


def quartiles(values: list[float]) -> Quartiles:
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def probe(
    target: Target, drafter: Drafter | None, max_tokens: int | None = None, clock: Clock = time.perf_counter
) -> Probe:
    """Costs are measured in turns, so that a machine that gets slower slows all of them. max_tokens: of the text that is
    run, None for what the target takes."""
    cache, block = _prepare(target, max_tokens or target.max_context_tokens)
    counts = [rows for rows in ROW_COUNTS if rows <= len(block)]
    context_tokens = cache.length
    verify_s, draft_s = _measure(target, drafter, cache, block, counts, clock)
    blocks = [target.forward(cache, block[:rows]).logits.copy() for rows in counts[1:]]
    alone = _one_by_one(target, cache, block)
    return Probe(
        context_tokens=context_tokens,
        repeats=len(verify_s[1]),
        rows_compared=sum(map(len, blocks)),
        max_logit_difference=max((float(np.abs(rows - alone[: len(rows)]).max()) for rows in blocks), default=0.0),
        argmax_flips=sum(int((rows.argmax(1) != alone[: len(rows)].argmax(1)).sum()) for rows in blocks),
        verify_s={rows: quartiles(values) for rows, values in verify_s.items()},
        draft_s=quartiles(draft_s) if draft_s else None,
    )


def _measure(
    target: Target, drafter: Drafter | None, cache: KVCache, block: list[int], counts: list[int], clock: Clock
) -> tuple[dict[int, list[float]], list[float]]:
    """-> seconds of a call by its rows, seconds of a drafted token; a first round warms up"""
    hidden = target.forward(cache, block[:1]).hidden[0].copy()
    verify_s: dict[int, list[float]] = {rows: [] for rows in counts}
    draft_s: list[float] = []
    begun, repeat = clock(), -1
    while repeat < MIN_REPEATS or (repeat < MAX_REPEATS and clock() - begun < BUDGET_S):
        for rows in counts:
            started = clock()
            target.forward(cache, block[:rows])
            verify_s[rows] += [clock() - started] if repeat >= 0 else []
        if drafter:
            started = clock()
            drafter.draft(cache, block[0], hidden, DRAFTS)
            draft_s += [(clock() - started) / DRAFTS] if repeat >= 0 else []
        repeat += 1
    return verify_s, draft_s


def _prepare(target: Target, max_tokens: int) -> tuple[KVCache, list[int]]:
    """A cache of CONTEXT_TOKENS random tokens, and as many more as a block may have: fewer where the context is short."""
    most = min(max_tokens, CONTEXT_TOKENS + MAX_DRAFT_TOKENS + 1)
    ids = np.random.default_rng(0).integers(0, target.spec.vocab_size, most).tolist()
    cache, context = target.new_cache(most), max(0, most - MAX_DRAFT_TOKENS - 1)
    while cache.length < context:
        target.append(cache, ids[cache.length : min(cache.length + cache.room, context)])
    return cache, ids[cache.length : cache.length + cache.room]


def _one_by_one(target: Target, cache: KVCache, block: list[int]) -> np.ndarray:
    """logits [len(block), V]; the rows are committed"""
    logits = []
    for token in block:
        output = target.forward(cache, [token])
        logits.append(output.logits[0].copy())
        cache.commit(output.new.k, output.new.v, 1)
    return np.stack(logits)


def tokens_of(count: int, acceptance: float) -> float:
    """Expected of a round with `count` drafts."""
    return sum(acceptance**place for place in range(count + 1))


def needed_acceptance(count: int, cost: float) -> float | None:
    """The least chance at which a round of `count` drafts makes as many tokens as it costs decodes; None: there is none."""
    if tokens_of(count, 1) < cost:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if tokens_of(count, middle) >= cost else (middle, high)
    return high


def verdict(costs: dict[int, float], usual: float = FIRST_CHANCE) -> str:
    """costs: as Probe.costs. usual: an acceptance to judge by."""
    costs = {count: cost for count, cost in costs.items() if count}
    gains = {count: tokens_of(count, usual) / cost for count, cost in costs.items()}
    needed = {count: least for count, cost in costs.items() if (least := needed_acceptance(count, cost)) is not None}
    if not costs:
        return "drafting cannot pay here: the context holds no block"
    best = max(gains, key=gains.__getitem__)
    if gains[best] > 1:
        return (
            f"drafting pays here: at K = {best} from an acceptance of {needed[best]:.2f} on; at {usual:.2f} it is "
            f"expected to be {gains[best]:.2f}x of plain decoding"
        )
    if needed:
        easiest = min(needed, key=needed.__getitem__)
        return (
            f"drafting pays here only from an acceptance of {needed[easiest]:.2f} on, at K = {easiest}; at "
            f"{usual:.2f} plain decoding is faster"
        )
    nearest = min(costs, key=lambda count: costs[count] / (count + 1))
    return (
        f"drafting cannot pay here: {nearest} draft tokens and their verify cost {costs[nearest]:.2f} decodes and make at "
        f"most {nearest + 1} tokens"
    )


def as_json(result: Probe, off_reason: str | None) -> dict:
    """All that was measured, the ratios and the verdict. off_reason: why nothing is drafted; without it and without a
    drafter the verdict is on drafts that cost nothing, by lookup."""
    return {
        **asdict(result),
        "busy": result.busy,
        "verify_s": {str(rows): entry._asdict() for rows, entry in result.verify_s.items()},
        "verify_ratio": {str(rows): ratio for rows, ratio in result.ratios().items()},
        "draft_s": result.draft_s._asdict() if result.draft_s else None,
        "draft_ratio": result.draft_ratio() if result.draft_s else None,
        "needed_acceptance": {
            str(count): needed_acceptance(count, cost) for count, cost in result.costs().items() if count
        },
        "verdict": f"drafting is off: {off_reason}" if off_reason else verdict(result.costs()),
    }


def lines(told: dict) -> list[str]:
    """What `as_json` gives, for a terminal."""
    rows, draft = told["verify_s"], told["draft_s"]
    width = len(max(rows, key=len))
    return [
        f"rows: {told['rows_compared']} rows of blocks differ from the same rows alone by at most "
        f"{told['max_logit_difference']:.3g} in a logit, {told['argmax_flips']} have another best token",
        f"costs: lower quartile (median, upper quartile) of {told['repeats']} after {told['context_tokens']} tokens; ratios by "
        "the first, for other programs only add time",
        *(
            f"verify {n:>{width}} {'row ' if n == '1' else 'rows'} {_ms(rows[n])}  {told['verify_ratio'][n]:.2f}x of one"
            for n in rows
        ),
        *([f"draft one token {_ms(draft)}  {told['draft_ratio']:.2f}x"] if draft else []),
        *([BUSY_NOTE] if told["busy"] else []),
        verdict_line(told),
    ]


def verdict_line(told: dict) -> str:
    return f"verdict{' on a busy machine, uncertain' if told['busy'] else ''}: {told['verdict']}"


def _ms(entry: dict) -> str:
    return f"{entry['low'] * 1e3:8.3f} ms ({entry['median'] * 1e3:.3f}, {entry['high'] * 1e3:.3f})"
