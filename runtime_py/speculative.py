"""The one loop: draft -> verify -> accept, batch size 1. Plain decoding is the same loop with zero drafts.

Invariant between rounds: the cache holds every token of `ids` but the last (pending) one, which the target chose and
has not yet run. A round runs [pending, d1..dK] through the target once, accepts the longest prefix of drafts that the
target agrees with, takes the target's own next token, and commits the rows of pending and the accepted drafts.

The target chooses a token from its logits at every verified row, greedily or drawn, as it would without drafts, and a
draft stands where it is that token. So the text, sampled or not, has the distribution of plain decoding.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .cache import KVCache
from .drafting import AutoPolicy, Clock, Drafting, DraftPolicy
from .manifest import TokensSpec
from .models import Drafter, Target
from .sampling import GREEDY, LogitsHook, Sampler, Sampling

Array = np.ndarray


@dataclass(frozen=True)
class Round:
    """Tokens that one target call added to the text. drafted, accepted: drafts in its block, drafts that are in the text.
    stop_reason: set in the last round, "stop", "length" or "context". drafter: of the block's drafts, "mtp" or "ngram"."""

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    stop_reason: str | None
    drafter: str | None = None


def prefill_chunks(target: Target, cache: KVCache, ids: list[int]) -> Iterator[None]:
    """Run and commit ids, a call at a time, until one call takes the rest."""
    while len(ids) - cache.length > cache.room:
        target.append(cache, ids[cache.length : cache.length + cache.room])
        yield


def prefill(target: Target, cache: KVCache, ids: list[int]) -> tuple[Array, Array]:
    """Run all uncommitted ids in chunks, commit them -> logits [V] and hidden [H] of the last one."""
    for _ in prefill_chunks(target, cache, ids):
        pass
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
    policy: DraftPolicy | AutoPolicy,
    sampling: Sampling = GREEDY,
    hook: LogitsHook | None = None,
    clock: Clock = time.perf_counter,
) -> Iterator[Round]:
    """Continue `ids`, which grows in place, by exactly max_new_tokens or less if a text ends. The ids may begin with
    rows that the cache holds (an earlier turn). A caller may stop at any round: ids and cache agree. drafter None: the
    policy may draft by lookup alone. clock: seconds."""
    check_request(target, cache, ids, max_new_tokens, cache.length)
    room = cache.max_context_tokens - len(ids)
    budget, limit = (room, "context") if room < max_new_tokens else (max_new_tokens, "length")
    if not budget:
        yield Round((), 0, 0, "context")
        return
    sampler, drafting = Sampler(sampling, hook), Drafting(policy, drafter, clock)
    logits, hidden = prefill(target, cache, ids)
    added, drafts, accepted, by = accept(ids, [], logits[None], sampler, tokens.eos)[0], [], 0, None
    while True:
        budget -= added
        stop_reason = "stop" if ids[-1] in tokens.eos else limit if not budget else None
        if stop_reason == "stop" and cache.length < len(ids):
            target.append(cache, ids[cache.length :])  # so that a next turn sees the end of this one
        yield Round(tuple(ids[-added:]), len(drafts), accepted, stop_reason, by)
        if stop_reason:
            return
        drafts = drafting.propose(cache, ids, hidden, min(budget, cache.room) - 1)
        output = target.forward(cache, [ids[-1], *drafts])
        added, accepted = accept(ids, drafts, output.logits, sampler, tokens.eos)
        cache.commit(output.new.k, output.new.v, accepted + 1)
        hidden, by = output.hidden[accepted], drafting.settle(ids, added, accepted)


class ContextFull(ValueError):
    """A prompt is longer than the context."""


def check_request(target: Target, cache: KVCache, ids: list[int], max_new_tokens: int, held: int) -> None:
    """ValueError if ids, of which the cache is to hold the first `held`, cannot be continued."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if len(ids) <= held:
        raise ValueError(f"no token to run: the cache holds all {len(ids)} of the prompt; add at least one")
    if len(ids) > cache.max_context_tokens:
        raise ContextFull(
            f"the prompt has {len(ids)} tokens, the context holds {cache.max_context_tokens}; shorten the prompt"
        )
    for token in ids:
        if not isinstance(token, int | np.integer) or isinstance(token, bool):
            raise ValueError(f"token id {token!r} is no whole number")
    for token in ids[held:]:
        if not 0 <= token < target.spec.vocab_size:
            raise ValueError(
                f"token id {token} is outside 0..{target.spec.vocab_size - 1}; use the bundle's own tokenizer"
            )


def accept(ids: list[int], drafts: list[int], logits: Array, sampler: Sampler, eos: tuple[int, ...]) -> tuple[int, int]:
    """Append the target's tokens to ids while they are the drafts d1..dK, and the first that is not or comes after all.
    logits [K+1, V] of [pending, d1..dK] -> how many tokens were added, how many of them are drafts.

    The text ends at a stop token wherever it stands in the block. ids stay as they were if the sampler raises.
    """
    start = len(ids)
    try:
        for accepted, row in enumerate(logits):
            ids.append(sampler(ids, row))
            if accepted == len(drafts) or ids[-1] != drafts[accepted]:
                return accepted + 1, accepted
            if ids[-1] in eos:
                break
    except BaseException:
        del ids[start:]
        raise
    return accepted + 1, accepted + 1
