"""Who drafts, and how many tokens: the policies, and the drafts of one text with their measured times.

Drafters: "mtp", the bundle's, and "ngram", lookup in the text so far. A policy is offered sources, "mtp" or "ngram" with
the length of the match ("ngram3"), each with the most drafts it can give, and plans the round.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .cache import KVCache
from .costs import MAX_DRAFT_TOKENS, Costs, Plan, Trial, decide, explain, learn
from .models import Drafter
from .ngram import Match, NgramIndex

DRAFTERS = ("mtp", "ngram")
Clock = Callable[[], float]


@dataclass(frozen=True)
class DraftPolicy:
    """A given number of tokens: num_tokens at first; "heuristic" then adds 2 when all were accepted, else takes 1 off
    (Transformers num_assistant_tokens_schedule)."""

    num_tokens: int
    schedule: str = "constant"
    drafters: tuple[str, ...] = ("mtp",)

    def next_length(self, length: int, drafted: int, accepted: int) -> int:
        if self.schedule == "constant" or not drafted:
            return length
        return min(length + 2, MAX_DRAFT_TOKENS) if accepted == drafted else max(1, length - 1)

    def start(self) -> "FixedLength":
        return FixedLength(self)


class FixedLength:
    """A DraftPolicy through one text; it takes the first source offered."""

    def __init__(self, policy: DraftPolicy):
        self._policy, self._length = policy, policy.num_tokens

    def plan(self, offers: dict[str, int]) -> Plan:
        source = next(iter(offers), None)
        return Plan(source, min(self._length, offers[source])) if source else Plan(None, 0)

    def learn(self, trial: Trial) -> None:
        self._length = self._policy.next_length(self._length, trial.drafted, trial.accepted)


class AutoPolicy:
    """The source and number that are expected to be fastest, none included. `costs` goes on from text to text."""

    def __init__(self, drafters: tuple[str, ...] = DRAFTERS):
        self.drafters, self.costs = drafters, Costs()

    def start(self) -> "AutoPolicy":
        return self

    def plan(self, offers: dict[str, int]) -> Plan:
        return decide(self.costs, offers)

    def learn(self, trial: Trial) -> None:
        self.costs = learn(self.costs, trial)

    def off_reason(self) -> str | None:
        """Why the bundle's drafter does not draft now, if it could."""
        return explain(self.costs, "mtp") if "mtp" in self.drafters else None


class Drafting:
    """The drafts of one text. Each round: `propose`, the caller verifies and commits, `settle`."""

    def __init__(self, policy: DraftPolicy | AutoPolicy, drafter: Drafter | None, clock: Clock = time.perf_counter):
        self._planner, self._clock = policy.start(), clock
        self._drafter = drafter if "mtp" in policy.drafters else None
        self._index = NgramIndex() if "ngram" in policy.drafters else None
        self._match: Match | None = None
        self._plan = Plan(None, 0)
        self._started = self._drafted = 0.0
        self._drafts: list[int] = []

    def propose(self, cache: KVCache, ids: list[int], hidden: np.ndarray, limit: int) -> list[int]:
        """At most `limit` drafts after ids. hidden [H]: the target's post-norm row that produced the last id."""
        self._started = self._clock()
        self._match = self._index.match(ids) if self._index else None
        self._plan = self._planner.plan(self._offers(min(limit, MAX_DRAFT_TOKENS)))
        if not self._plan.count:
            self._drafts = []
        elif self._plan.source == "mtp":
            self._drafts = self._drafter.draft(cache, ids[-1], hidden, self._plan.count)
        else:
            self._drafts = self._match.drafts(ids, self._plan.count)
        self._drafted = self._clock()
        return self._drafts

    def _offers(self, limit: int) -> dict[str, int]:
        if limit < 1:
            return {}
        offers = {"mtp": limit} if self._drafter else {}
        return {**offers, f"ngram{self._match.tokens}": limit} if self._match else offers

    def settle(self, ids: list[int], added: int, accepted: int) -> str | None:
        """ids: with the `added` tokens of the round -> the drafter of its drafts, if there were any."""
        verify_s, new = self._clock() - self._drafted, ids[-added:]
        agreed = {"mtp": agreement(self._drafts, new)} if self._plan.source == "mtp" else {}
        if self._match:
            agreed[f"ngram{self._match.tokens}"] = agreement(self._match.drafts(ids, added), new)
        drafted, draft_s = len(self._drafts), self._drafted - self._started
        self._planner.learn(Trial(self._plan, drafted, accepted, added, draft_s, verify_s, agreed))
        return self._plan.source.rstrip("0123456789") if drafted else None


def agreement(drafts: list[int], new: list[int]) -> tuple[int, int]:
    """How many drafts agree with the new tokens before the first that does not, and how many were compared."""
    hits = 0
    for draft, token in zip(drafts, new, strict=False):
        if draft != token:
            return hits, hits + 1
        hits += 1
    return hits, hits
