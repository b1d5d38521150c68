"""Tokenizers and chats that the tests of the text edge share."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from runtime_py.events import Event, EventParser, TextDelta, ThoughtDelta
from runtime_py.manifest import FileSpec, TokensSpec
from runtime_py.text import TEMPLATE, Text

from .pairs import TINY, write_tokenizer

VOCAB, BYTES, PIECES = 300, 4, 260  # ids of the made-up tokenizer: 4 special tokens, 256 bytes, then pieces
NAMED = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
TOKENS = TokensSpec(bos=2, pad=0, eos=(1, 106), special=NAMED)
GEMMA = Path(os.environ.get("GEMMA4_DATA") or Path(__file__).parent.parent.parent / "shared/data/gemma4")
needs_gemma = pytest.mark.skipif(
    not GEMMA.is_dir(), reason=f"{GEMMA}: Gemma's tokenizer data is not here; GEMMA4_DATA names its folder"
)


def text_of(folder: Path, vocab: int = VOCAB, tokens: TokensSpec = TOKENS) -> Text:
    files = {path.name: FileSpec("", path.stat().st_size) for path in folder.iterdir() if path.is_file()}
    return Text(folder, SimpleNamespace(tokens=tokens, files=files, target=SimpleNamespace(vocab_size=vocab)))


def chat_text(folder: Path, template: str) -> Text:
    """The made-up tokenizer and a template."""
    write_tokenizer(folder, VOCAB)
    (folder / TEMPLATE).write_text(template, encoding="utf-8")
    return text_of(folder)


def tiny_text() -> Text:
    """The tiny pair's: a byte-fallback vocabulary with Gemma's special tokens."""
    return text_of(TINY / "target", 1024)


def hf_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """As Transformers loads a folder; of one without a tokenizer_config, its tokenizer with NAMED tokens."""
    if (folder / "tokenizer_config.json").is_file():
        return AutoTokenizer.from_pretrained(folder)
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **NAMED)


def ids_of(text: Text, written: str) -> list[int]:
    return text.tokenizer.encode(written, add_special_tokens=False).ids


def spelled(text: Text, written: str) -> list[int]:
    """Ids of ordinary tokens that decode to what a special token is written as."""
    ids = [token for character in written for token in ids_of(text, character)]
    assert not any(text.is_skipped(token) for token in ids)
    return ids


def parse(text: Text, ids: list[int], burst: int = 1) -> list[Event]:
    """Adjacent deltas of a kind are joined."""
    parser, events = EventParser(text), []
    for i in range(0, len(ids), burst):
        events += parser.push(ids[i : i + burst])
    return joined([*events, *parser.finish()])


def joined(events: list[Event]) -> list[Event]:
    result: list[Event] = []
    for event in events:
        if isinstance(event, TextDelta | ThoughtDelta) and result and type(result[-1]) is type(event):
            result[-1] = type(event)(result[-1].text + event.text)
        else:
            result.append(event)
    return result
