"""The one loop: draft -> verify -> accept, greedy, batch size 1. Plain decoding is the same loop with zero drafts.

Invariant between rounds: the cache holds every token of `ids` but the last (pending) one, which the target chose and
has not yet run. A round runs [pending, d1..dK] through the target once, accepts the longest prefix of drafts that the
target agrees with, takes the target's own next token, and commits the rows of pending and the accepted drafts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .cache import KVCache
from .manifest import TokensSpec
from .models import Drafter, Target

Array = np.ndarray
MAX_DRAFT_TOKENS = 16


@dataclass(frozen=True)
class DraftPolicy:
    """How many tokens to draft: num_tokens at first; "heuristic" then adds 2 when all were accepted, else takes 1 off
    (Transformers num_assistant_tokens_schedule)."""

    num_tokens: int
    schedule: str = "constant"

    def next_length(self, length: int, drafted: int, accepted: int) -> int:
        if self.schedule == "constant" or not drafted:
            return length
        return min(length + 2, MAX_DRAFT_TOKENS) if accepted == drafted else max(1, length - 1)


@dataclass(frozen=True)
class Round:
    """Tokens that one target call added to the text. drafted, accepted: drafts in its block, drafts that are in the text.
    stop_reason: set in the last round, "stop", "length" or "context"."""

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    stop_reason: str | None


def prefill(target: Target, cache: KVCache, ids: list[int]) -> tuple[Array, Array]:
    """Run all uncommitted ids in chunks, commit them -> logits [V] and hidden [H] of the last one."""
    while len(ids) - cache.length > cache.room:
        target.append(cache, ids[cache.length : cache.length + cache.room])
    rest = ids[cache.length :]
    output = target.forward(cache, rest, last_row_only=True)
    cache.commit(output.new.k, output.new.v, len(rest))
    return output.logits[0], output.hidden[0]


def generate(
    target: Target,
    drafter: Drafter | None,
    cache: KVCache,
    ids: list[int],
    max_new_tokens: int,
    tokens: TokensSpec,
    policy: DraftPolicy,
) -> Iterator[Round]:
    """Continue `ids`, which grows in place, by exactly max_new_tokens or less if a text ends. The ids may begin with
    rows that the cache holds (an earlier turn). A caller may stop at any round: ids and cache agree."""
    _check_request(target, cache, ids, max_new_tokens)
    room = cache.max_context_tokens - len(ids)
    budget, limit = (room, "context") if room < max_new_tokens else (max_new_tokens, "length")
    if not budget:
        yield Round((), 0, 0, "context")
        return
    logits, hidden = prefill(target, cache, ids)
    block, drafted, accepted, length = [int(logits.argmax())], 0, 0, policy.num_tokens
    ids += block
    while True:
        budget -= len(block)
        stop_reason = "stop" if block[-1] in tokens.eos else limit if not budget else None
        if stop_reason == "stop" and cache.length < len(ids):
            target.append(cache, ids[cache.length :])  # so that a next turn sees the end of this one
        yield Round(tuple(block), drafted, accepted, stop_reason)
        if stop_reason:
            return
        count = min(length, budget - 1, cache.room - 1) if drafter else 0
        drafts = drafter.draft(cache, ids[-1], hidden, count) if count else []
        output = target.forward(cache, [ids[-1], *drafts])
        block, accepted = accept(drafts, output.logits.argmax(-1).tolist(), tokens.eos)
        ids += block
        cache.commit(output.new.k, output.new.v, accepted + 1)
        hidden, drafted = output.hidden[accepted], len(drafts)
        length = policy.next_length(length, drafted, accepted)


def _check_request(target: Target, cache: KVCache, ids: list[int], max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if len(ids) <= cache.length:
        raise ValueError(f"no token to run: the cache holds all {len(ids)} of the prompt; add at least one")
    if len(ids) > cache.max_context_tokens:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, the context holds {cache.max_context_tokens}; shorten the prompt"
        )
    for token in ids[cache.length :]:
        if not 0 <= token < target.spec.vocab_size:
            raise ValueError(
                f"token id {token} is outside 0..{target.spec.vocab_size - 1}; use the bundle's own tokenizer"
            )


def accept(drafts: list[int], own: list[int], eos: tuple[int, ...]) -> tuple[list[int], int]:
    """Drafts d1..dK and the target's own tokens after [pending, d1..dK] -> new tokens of the text, how many are drafts.

    The text ends at a stop token wherever it stands in the block.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == own[accepted]:
        accepted += 1
        if own[accepted - 1] in eos:
            return drafts[:accepted], accepted
    return [*drafts[:accepted], own[accepted]], accepted
