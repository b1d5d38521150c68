"""How good a bundle is on a text: perplexity, distance from another bundle of the same checkpoint, accepted drafts.

The text's tokens, cut into windows of at most `context` - 1, each after a bos of its own: every token of the text counts
once, predicted from the bos and the tokens before it in its window. Both bundles run the same blocks in step, and no more
than a block of their logits is held.

Legend: T rows of a block, V vocab_size. Logarithms are natural.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from .comparable import Plan
from .drafting import DraftPolicy
from .loading import Pair
from .measure import draft_statistics
from .models import Target
from .speculative import Round, generate

BLOCK_ROWS = 64  # of a call: at most 67 MB of logits for 262,144 tokens
PREFIXES, PREFIX_TOKENS, CONTINUATION_TOKENS = 32, 64, 32  # texts that drafts continue
NAMES = ("bundle", "against")

Array = np.ndarray


class Score(NamedTuple):
    """Of one token. losses: -log p of each bundle; kl: of the reference's distribution from the bundle's, agrees: whether
    their best tokens are the same, both None without a reference."""

    losses: tuple[float, ...]
    kl: float | None
    agrees: bool | None


@dataclass(frozen=True)
class Distance:
    """kl: KL(reference || bundle) of a token in nats. agreement: share of tokens with the same best one."""

    kl_mean: float
    kl_median: float
    kl_max: float
    agreement: float


@dataclass(frozen=True)
class Quality:
    """Of one bundle. loss: mean -log p of a token. accepted: counts by place of a draft in its block, None: not measured,
    off_reason may say why."""

    path: str
    name: str
    recipe: str
    kv_dtype: str
    backend: str
    loss: float
    perplexity: float
    accepted: tuple[dict[str, int], ...] | None
    off_reason: str | None


@dataclass(frozen=True)
class Evaluation:
    tokens: int
    context: int
    windows: int
    draft_tokens: int
    continuations: int
    qualities: tuple[Quality, ...]
    distance: Distance | None


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {path}: no UTF-8 ({error}); give a text file in UTF-8") from None
    except OSError as error:
        raise ValueError(f"--text {path}: cannot be read ({error.strerror}); give a text file in UTF-8") from None


def text_ids(pair: Pair, text: str, limit: int | None) -> list[int]:
    """The first `limit` tokens of a text, without bos."""
    ids = pair.text.encode_prompt(text)[1:] if text else []
    if not ids:
        raise ValueError("the text has no tokens; give a file that holds some")
    return ids[:limit]


def run(pairs: Sequence[tuple[Path, Pair]], text: str, limit: int | None, plan: Plan) -> Evaluation:
    """Of the first `limit` tokens of a text, with a bar where somebody watches."""
    ids, loaded = text_ids(pairs[0][1], text, limit), [pair for _, pair in pairs]
    with tqdm(total=work(ids, loaded, plan.draft_tokens), unit="token", disable=None) as bar:
        return evaluate(pairs, ids, plan.context, plan.draft_tokens, bar.update)


def evaluate(
    pairs: Sequence[tuple[Path, Pair]],
    ids: list[int],
    context: int,
    draft_tokens: int,
    progress: Callable[[int], object],
) -> Evaluation:
    """pairs: the bundle and maybe its reference. draft_tokens 0: drafts are not measured. progress: is told of tokens
    done, of work(..) in all."""
    loaded = [pair for _, pair in pairs]
    scores = []
    for score in score_text([pair.target for pair in loaded], windows(ids, loaded[0].manifest.tokens.bos, context)):
        scores.append(score)
        progress(1)
    starts = prefixes(ids, loaded[0].manifest.tokens.bos) if draft_tokens else []
    qualities = []
    for (path, pair), losses in zip(pairs, zip(*(score.losses for score in scores), strict=True), strict=True):
        loss = math.fsum(losses) / len(losses)
        accepted = accepted_drafts(pair, starts, draft_tokens, progress) if starts and pair.drafter else None
        recipe = pair.manifest.backends[pair.backend].quantization.title
        told = str(path), pair.manifest.name, recipe, pair.manifest.kv.dtype, pair.backend, loss, _exp(loss), accepted
        qualities.append(Quality(*told, pair.off_reason if draft_tokens else None))
    return Evaluation(
        tokens=len(ids),
        context=context,
        windows=-(-len(ids) // (context - 1)),
        draft_tokens=draft_tokens,
        continuations=len(starts),
        qualities=tuple(qualities),
        distance=_distance(scores) if len(pairs) > 1 else None,
    )


def work(ids: list[int], pairs: Sequence[Pair], draft_tokens: int) -> int:
    """Tokens that `evaluate` tells of."""
    drafting = sum(pair.drafter is not None for pair in pairs) if draft_tokens else 0
    return len(ids) + drafting * len(prefixes(ids, 0)) * CONTINUATION_TOKENS


def windows(ids: list[int], bos: int, context: int) -> Iterator[list[int]]:
    for start in range(0, len(ids), context - 1):
        yield [bos, *ids[start : start + context - 1]]


def score_text(targets: Sequence[Target], parts: Iterator[list[int]]) -> Iterator[Score]:
    """Of every token of the windows but the first of each."""
    for window in parts:
        caches = [target.new_cache(len(window)) for target in targets]
        while (done := caches[0].length) < len(window) - 1:
            rows = min(BLOCK_ROWS, len(window) - 1 - done, *(cache.room for cache in caches))
            logits = []
            for target, cache in zip(targets, caches, strict=True):
                output = target.forward(cache, window[done : done + rows])
                cache.commit(output.new.k, output.new.v, rows)
                logits.append(output.logits)
            for token, *row in zip(window[done + 1 : done + rows + 1], *logits, strict=True):
                yield score_token(token, row)


def score_token(token: int, rows: Sequence[Array]) -> Score:
    """rows: logits [V] of the bundle and maybe of its reference. ValueError if they are no distribution."""
    parts = [softmax(row) for row in rows]
    losses = tuple(float(part.log_total - part.shifted[token]) for part in parts)
    if not all(map(math.isfinite, losses)):
        raise ValueError("logits are not finite; run python -m export check on the bundle")
    if len(parts) == 1:
        return Score(losses, None, None)
    ours, reference = parts
    kl = float(reference.weights @ (reference.shifted - ours.shifted)) / math.exp(reference.log_total)
    kl += ours.log_total - reference.log_total
    return Score(losses, max(0.0, kl), bool(rows[0].argmax() == rows[1].argmax()))  # below 0 by rounding alone


class Softmax(NamedTuple):
    """shifted, weights [V]: logits less the largest, and their exponentials. log_total: log of the sum of weights."""

    shifted: Array
    weights: Array
    log_total: float


def softmax(logits: Array) -> Softmax:
    """Of float32 [V], in float32 but for the sum: with 262,144 tokens float64 takes 20 times as long, to change a KL by
    1.5e-8."""
    shifted = logits - logits.max()
    weights = np.exp(shifted)
    return Softmax(shifted, weights, math.log(weights.sum(dtype=np.float64)))


def _distance(scores: list[Score]) -> Distance:
    kl = np.array([score.kl for score in scores])
    agreement = sum(score.agrees for score in scores) / len(scores)
    return Distance(float(kl.mean()), float(np.median(kl)), float(kl.max()), agreement)


def prefixes(ids: list[int], bos: int) -> list[list[int]]:
    """Up to PREFIXES pieces of the text, evenly spread, none over another, each after a bos."""
    length = min(PREFIX_TOKENS, len(ids))
    count = min(PREFIXES, len(ids) // length)
    return [[bos, *ids[start : start + length]] for start in (i * len(ids) // count for i in range(count))]


def accepted_drafts(
    pair: Pair, starts: list[list[int]], draft_tokens: int, progress: Callable[[int], object]
) -> tuple[dict[str, int], ...]:
    """drafted and accepted by place in the block, while the bundle continues each prefix greedily, as `generate` does:
    past the first draft nothing but the target's own text can tell what it accepts."""
    rounds: list[Round] = []
    policy, target = DraftPolicy(draft_tokens), pair.target
    for ids in starts:
        ids = ids[: target.max_context_tokens - 1]
        cache = target.new_cache(min(target.max_context_tokens, len(ids) + CONTINUATION_TOKENS))
        rounds += generate(target, pair.drafter, cache, list(ids), CONTINUATION_TOKENS, pair.manifest.tokens, policy)
        progress(CONTINUATION_TOKENS)
    return tuple(draft_statistics(rounds)["per_position"])


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def as_json(result: Evaluation, text: Path, threads: int) -> dict:
    """Both bundles by their names in NAMES; "against" and "distance" are None without a reference."""
    qualities = itertools.zip_longest(NAMES, map(asdict, result.qualities))
    return {
        "text": str(text),
        "tokens": result.tokens,
        "context": result.context,
        "windows": result.windows,
        "threads": threads,
        "draft_tokens": result.draft_tokens,
        "continuations": {"count": result.continuations, "tokens": CONTINUATION_TOKENS},
        **dict(qualities),
        "distance": asdict(result.distance) if result.distance else None,
    }


def lines(told: dict) -> list[str]:
    """What `as_json` gives, for a terminal."""
    held = {name: told[name] for name in NAMES if told[name]}
    width, distance = max(len(_title(entry)) for entry in held.values()), told["distance"]
    rows = [f"{name:7}  {_title(entry):{width}}  perplexity {entry['perplexity']:.4f}" for name, entry in held.items()]
    drafts = [f"{name:7}  {_accepted(entry)}" for name, entry in held.items() if told["draft_tokens"]]
    continued = f"{told['continuations']['count']} prefixes, {told['continuations']['tokens']} tokens each"
    return [
        f"{told['tokens']} tokens of {told['text']} in {told['windows']} windows of {told['context']}, {told['threads']} threads",
        *rows,
        *([_told_distance(distance, told["tokens"])] if distance else []),
        *([f"accepted drafts by position, continuing {continued}, greedily:", *drafts] if drafts else []),
    ]


def _title(entry: dict) -> str:
    kv = "" if entry["kv_dtype"] == "float32" else f", KV in {entry['kv_dtype']}"
    return f"{entry['name']} {entry['recipe']} on {entry['backend']}{kv}"


def _told_distance(distance: dict, tokens: int) -> str:
    same = round(distance["agreement"] * tokens)
    return (
        f"KL(against || bundle) a token: mean {distance['kl_mean']:.3g}, median {distance['kl_median']:.3g}, "
        f"max {distance['kl_max']:.3g} nats; the same best token at {distance['agreement']:.2%} ({same} of {tokens})"
    )


def _accepted(entry: dict) -> str:
    if entry["accepted"] is None:
        return f"none: {entry['off_reason']}"
    places = [place for place in entry["accepted"] if place["drafted"]]
    return " ".join(f"{place['accepted'] / place['drafted']:.2f}" for place in places) + (
        f" (of {places[0]['drafted']} rounds)" if places else "none"
    )
