"""Train the tiny pair in models/tiny: a Gemma 4 target and its MTP drafter, small enough for tests and CI.

    python -m tools.train_tiny [--corpus DIR] [--out models/tiny] [--smoke]     # about 25 minutes on one CPU thread
    python -m tools.train_tiny --measure [--out models/tiny]                    # only measure an existing pair

The pair has every feature of Gemma 4 E2B at toy sizes: sliding and full layers with different head_dims, KV-shared
layers with a double-wide MLP, per-layer inputs, softcapped tied head, and a drafter with a centroid head that reads the
target's keys and values. Phases: tokenizer -> target (next token) -> the target's own text -> drafter (distillation
over several recurrent draft steps) -> bf16 checkpoints -> measured with Transformers' own generate.

Shapes: B rows, T tokens, V vocabulary, H target width, h drafter width, C centroids, W sliding window, S draft steps,
Q draft blocks per row.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, Gemma4AssistantForCausalLM, Gemma4ForCausalLM
from transformers.utils import logging as transformers_logging

from tools import tiny_corpus as corpus
from tools import tiny_measure
from tools.tiny_models import (
    CENTROIDS,
    CENTROIDS_READ,
    causal_masks,
    draft_masks,
    make_drafter,
    make_target,
    round_weights,
    save_model,
    target_logits,
)

SEED = 1
DRAFT_STEPS = 4
BLOCK_STRIDE = 2  # a draft block at every second token: neighbours teach nearly the same, and cost as much
PEAK_RATE = 4e-3


@dataclass(frozen=True)
class Recipe:
    """How much to train; what is trained is fixed."""

    target_steps: int
    drafter_steps: int
    own_batches: int  # batches of 64 rows that the target writes for its drafter
    prompts: int
    rows: int = 16
    row_tokens: int = 256


FULL = Recipe(target_steps=1000, drafter_steps=500, own_batches=8, prompts=40)
SMOKE = Recipe(target_steps=12, drafter_steps=8, own_batches=1, prompts=6, rows=4, row_tokens=64)


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def make_optimizer(model: nn.Module, decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": decay},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)


def scheduled(optimizer: torch.optim.Optimizer, steps: int, warmup: float = 0.04, floor: float = 0.02) -> Iterator[int]:
    """Step numbers; before each the learning rate is set: linear warm-up, then a cosine down to `floor` x peak."""
    for step in range(steps):
        done = step / steps
        cosine = 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))
        scale = (done + 1 / steps) / warmup if done < warmup else floor + (1 - floor) * cosine
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(scale, 1.0)
        yield step


def descend(loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def mixed_precision() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)  # 1.8 x faster than float32; logits and losses stay float32


def train_target(target: Gemma4ForCausalLM, rows: corpus.TextRows, recipe: Recipe) -> None:
    """Next-token training on half raw, half chat rows."""
    masks, positions = causal_masks(recipe.row_tokens), torch.arange(recipe.row_tokens)[None]
    optimizer, start = make_optimizer(target, decay=0.05), time.perf_counter()
    for step in scheduled(optimizer, recipe.target_steps):
        ids = rows.batch(recipe.rows, recipe.row_tokens + 1)
        with mixed_precision():
            hidden = target.model(
                input_ids=ids[:, :-1], attention_mask=masks, position_ids=positions, use_cache=False
            ).last_hidden_state
        loss = F.cross_entropy(target_logits(target, hidden).flatten(0, 1), ids[:, 1:].flatten())
        descend(loss, target, optimizer)
        if step % 25 == 0 or step == recipe.target_steps - 1:
            log(f"target step {step} loss {loss.item():.3f} elapsed {time.perf_counter() - start:.0f} s")
    target.requires_grad_(False)
    round_weights(target)


@torch.no_grad()
def write_own_text(target: Gemma4ForCausalLM, rows: corpus.TextRows, recipe: Recipe, batch: int = 64) -> Tensor:
    """Rows [N, T + 1]: 17..65 ids of real text, continued by the target: 3/4 greedily, 1/4 at temperature 0.7."""
    batches, start = [], time.perf_counter()
    greedy = batch * 3 // 4
    for index in range(recipe.own_batches):
        ids = rows.batch(batch, min(16 * (1 + index % 4) + 1, recipe.row_tokens // 2))
        cache, fresh = DynamicCache(config=target.config), ids
        while ids.shape[1] < recipe.row_tokens + 1:
            logits = target(input_ids=fresh, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            logits[:, [corpus.PAD, corpus.BOS, corpus.EOS]] = -torch.inf
            fresh = logits.argmax(-1, keepdim=True)
            fresh[greedy:] = torch.multinomial((logits[greedy:] / 0.7).softmax(-1), 1)
            ids = torch.cat([ids, fresh], 1)
        batches.append(ids)
    log(f"own text: {sum(ids.numel() for ids in batches)} ids in {time.perf_counter() - start:.0f} s")
    return torch.cat(batches)


@dataclass(frozen=True)
class Lesson:
    """What the frozen target makes of a batch; row t of hidden, probs and wanted is about token t + 1."""

    embeds: Tensor  # [B, T + 1, H], scaled
    hidden: Tensor  # [B, T, H], after the final norm
    probs: Tensor  # [B, T, V]
    best: Tensor  # [B, T], ids
    wanted: Tensor  # [B, T, V]: what the drafter imitates, half `probs`, half all weight on `best`
    donor_kv: dict[str, tuple[Tensor, Tensor]]  # by layer type, keys and values [B, 1, T, head_dim]


@torch.no_grad()
def make_lesson(target: Gemma4ForCausalLM, ids: Tensor, masks: dict[str, Tensor]) -> Lesson:
    """One teacher-forced target pass over ids [B, T + 1]."""
    tokens = ids.shape[1] - 1
    with mixed_precision():
        seen = target.model(
            input_ids=ids[:, :-1],
            attention_mask=masks,
            position_ids=torch.arange(tokens)[None],
            use_cache=False,
            return_shared_kv_states=True,
        )
        embeds = target.model.embed_tokens(ids)
    hidden = seen.last_hidden_state.float()
    probs = target_logits(target, hidden).softmax(-1)
    best = probs.argmax(-1)
    wanted = (0.5 * probs).scatter_add_(-1, best[..., None], torch.full((*best.shape, 1), 0.5))
    return Lesson(embeds, hidden, probs, best, wanted, dict(seen.shared_kv_states))


def draft_rows(
    drafter: Gemma4AssistantForCausalLM, lesson: Lesson, pending: Tensor, masks: dict[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """At draft steps 1..S: the drafter's post-norm rows [B, Q, h] and which rows of the lesson [Q] they should match.

    The block of pending token t stays at position t. Step s gets token t + s - 1 and the previous state, at first the
    target's hidden row t - 1, and drafts token t + s, which is what the target says in row t + s - 1.
    """
    state = lesson.hidden[:, pending - 1]
    for step in range(DRAFT_STEPS):
        with mixed_precision():
            pair = torch.cat([lesson.embeds[:, pending + step], state], -1)
            rows = drafter.model(
                inputs_embeds=drafter.pre_projection(pair),
                attention_mask=masks,
                position_ids=pending[None],
                shared_kv_states=lesson.donor_kv,
                use_cache=False,
                logits_to_keep=torch.tensor(0),  # as a plain int it makes Transformers 5.24 slice absent inputs
            ).last_hidden_state.float()
        state = drafter.post_projection(rows)
        yield rows, pending + step


def soft_cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """Mean cross-entropy of logits [B, Q, n] against distributions of the same shape."""
    return -(wanted * logits.log_softmax(-1)).sum(-1).mean()


@torch.no_grad()
def cluster_evenly(points: Tensor, clusters: int, rounds: int = 30) -> Tensor:
    """k-means with clusters of equal size: row numbers of points [N, h] as [clusters, N / clusters], shuffled."""
    size = len(points) // clusters
    centres = points[torch.randperm(len(points))[:clusters]].clone()
    for _ in range(rounds):
        owner, room = [-1] * len(points), [size] * clusters
        for pair in torch.cdist(points, centres).flatten().argsort().tolist():  # nearest pairs choose first
            point, cluster = divmod(pair, clusters)
            if owner[point] < 0 and room[cluster]:
                owner[point] = cluster
                room[cluster] -= 1
        members = [torch.tensor(owner).eq(cluster).nonzero()[:, 0] for cluster in range(clusters)]
        centres = torch.stack([points[rows].mean(0) for rows in members])
    return torch.stack([members[cluster][torch.randperm(size)] for cluster in torch.randperm(clusters).tolist()])


@torch.no_grad()
def set_centroids(drafter: Gemma4AssistantForCausalLM) -> Tensor:
    """Group the tokens by the drafter's own head and start the centroids at the means; membership [V, C], one-hot."""
    head, masked = drafter.lm_head.weight, drafter.masked_embedding
    groups = cluster_evenly(head, CENTROIDS)  # [C, V / C]
    order = groups.flatten()
    assert not torch.equal(order[order], torch.arange(len(order))), "an own inverse would hide a wrong use of it"
    masked.token_ordering.copy_(order)
    masked.centroids.weight.copy_(head[groups].mean(1))
    membership = torch.zeros(len(order), CENTROIDS)
    membership[order, torch.arange(CENTROIDS).repeat_interleave(groups.shape[1])] = 1.0
    return membership


def draft_loss(
    drafter: Gemma4AssistantForCausalLM,
    lesson: Lesson,
    pending: Tensor,
    masks: dict[str, Tensor],
    membership: Tensor | None,
) -> tuple[Tensor, list[float]]:
    """(loss over all blocks and draft steps, share of drafts equal to the target's best token at steps 1..S).

    With a `membership` [V, C] the centroids learn the target's distribution over groups, and drafts count as the
    centroid head would give them.
    """
    loss, agreement = torch.zeros(()), []
    for rows, at in draft_rows(drafter, lesson, pending, masks):
        logits = F.linear(rows, drafter.lm_head.weight)
        loss = loss + soft_cross_entropy(logits, lesson.wanted[:, at]) / DRAFT_STEPS
        drafted = logits.detach()
        if membership is not None:
            scores = drafter.masked_embedding.centroids(rows)  # [B, Q, C]
            loss = loss + 0.5 * soft_cross_entropy(scores, lesson.probs[:, at] @ membership) / DRAFT_STEPS
            read = torch.zeros_like(scores).scatter(-1, scores.topk(CENTROIDS_READ).indices, 1.0)
            drafted = drafted.masked_fill(read @ membership.T == 0, -torch.inf)
        agreement.append((drafted.argmax(-1) == lesson.best[:, at]).float().mean().item())
    return loss, agreement


def train_drafter(
    drafter: Gemma4AssistantForCausalLM,
    target: Gemma4ForCausalLM,
    rows: corpus.TextRows,
    own_text: Tensor,
    recipe: Recipe,
) -> None:
    """Distil the target into the drafter, 3/4 on the target's own text; the centroid head joins after 40 %."""
    target_masks = causal_masks(recipe.row_tokens)
    pending = torch.arange(1, recipe.row_tokens - DRAFT_STEPS + 1, BLOCK_STRIDE)
    drafter_masks = draft_masks(pending, recipe.row_tokens)
    optimizer, start = make_optimizer(drafter, decay=0.01), time.perf_counter()
    real, membership = recipe.rows // 4, None
    for step in scheduled(optimizer, recipe.drafter_steps):
        if step == recipe.drafter_steps * 2 // 5:
            membership = set_centroids(drafter)
        own = own_text[torch.randint(len(own_text), (recipe.rows - real,))]
        ids = torch.cat([own, rows.batch(real, recipe.row_tokens + 1)])
        lesson = make_lesson(target, ids, target_masks)
        loss, agreement = draft_loss(drafter, lesson, pending, drafter_masks, membership)
        descend(loss, drafter, optimizer)
        if step % 25 == 0 or step == recipe.drafter_steps - 1:
            shares = " ".join(f"{share:.3f}" for share in agreement)
            seconds = time.perf_counter() - start
            log(f"drafter step {step} loss {loss.item():.3f} agreement {shares} elapsed {seconds:.0f} s")
    round_weights(drafter)


def train_pair(texts: Path, out: Path, recipe: Recipe) -> None:
    """From play texts to a folder with target/, assistant/ and prompts.json."""
    torch.manual_seed(SEED)
    plays, held_out = corpus.read_plays(texts)
    tokenizer = corpus.build_tokenizer(plays)
    rows = corpus.TextRows(tokenizer, plays, SEED)
    target = make_target()
    drafter = make_drafter(target)
    for model in (target, drafter):
        model.set_attn_implementation("eager")  # the fastest at these sizes
    log(f"{len(plays)} training texts, {sum(map(len, plays))} characters, {len(held_out)} held out")

    train_target(target, rows, recipe)
    own_text = write_own_text(target, rows, recipe)
    train_drafter(drafter, target, rows, own_text, recipe)
    for role, model in (("target", target), ("assistant", drafter)):
        save_model(model, out / role)
        corpus.save_tokenizer(tokenizer, out / role)
    tiny_measure.write_prompts(out, corpus.TextRows(tokenizer, held_out, SEED), recipe.prompts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.train_tiny", description="train or measure the tiny pair")
    parser.add_argument("--corpus", type=Path, help=f"unpacked {corpus.ARCHIVE}; default: fetched into build/corpus")
    parser.add_argument("--out", type=Path, help="folder of the pair (models/tiny; with --smoke build/tiny-smoke)")
    parser.add_argument("--smoke", action="store_true", help="a few steps only: shows that everything runs")
    parser.add_argument("--measure", action="store_true", help="only measure the pair in --out and print the figures")
    options = parser.parse_args()
    out = options.out or Path("build/tiny-smoke" if options.smoke else "models/tiny")
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        texts, start = corpus.find_texts(options.corpus), time.perf_counter()
        if not options.measure:
            train_pair(texts, out, SMOKE if options.smoke else FULL)
            log(f"trained in {(time.perf_counter() - start) / 60:.1f} minutes")
        figures = tiny_measure.measure_pair(out, texts)
        print(tiny_measure.figures_table(figures))
        if not options.measure:
            tiny_measure.write_card(out, figures)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
