"""Text of the Java core: the ids, texts and streamed pieces of `tokenizers` and runtime_py, for Gemma's vocabulary, the tiny
pair's and a made-up one; what a tokenizer file asks beyond Gemma's form is refused by name."""

import functools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_py.text import Text, TextStream

from .edits import REMOVED, edit_json
from .jvm import Jvm, Refused, needs_jdk
from .pairs import TINY, write_tokenizer
from .texts import BYTES, GEMMA, NAMED, PIECES, VOCAB, needs_gemma, text_of

PARTS = (
    *("<|turn>", "<turn|>", "<bos>", "<eos>", "<|channel>thought\n", "<|turn", "turn|>", "<0x41>", "<0xE2>", "<pad><pad>"),
    *(" ", "  ", "\n", "\n\n\n", "\t", " \n ", "\r\n", "\u2581", "\u2581\u2581", "the", " the", "Hello", " world", "don't", "1234567"),
    *("é", "e\u0301", "नमस्ते", "日本語", "👩‍👩‍👧", "🇩🇪", "\u200b", "\ufffd", "\ufeff", "\x00", "\x7f", "𒀀", "{}();", "a" * 40, "\n" * 35),
)  # fmt: skip
WRITTEN = st.text(max_size=40) | st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=12).map("".join)

SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
NESTED = functools.reduce(lambda inside, _: [inside], range(300), [])


@pytest.fixture(scope="module")
def ten_thousand() -> list[str]:
    """Texts that hypothesis writes."""
    found: list[str] = []

    @settings(max_examples=334, deadline=None, database=None)
    @given(st.lists(WRITTEN, min_size=30, max_size=40))
    def write(texts: list[str]) -> None:
        found.extend(texts)

    write()
    assert len(found) >= 10_000
    return found[:10_000]


def ask(jvm: Jvm, folder: Path, texts=(), decode=(), stream=()) -> list:
    path, special = str(folder / "tokenizer.json"), NAMED
    return jvm.ask("tokenizer", path=path, special=special, texts=texts, decode=decode, stream=stream)


def assert_same_ids(jvm: Jvm, folder: Path, text: Text, texts: list[str]) -> None:
    theirs = ask(jvm, folder, texts)
    ours = [found.ids for found in text.tokenizer.encode_batch(texts, add_special_tokens=False)]
    for written, mine, java in zip(texts, ours, theirs, strict=True):
        assert java == mine, written
    assert ask(jvm, folder, decode=ours) == [text.decode(ids) for ids in ours]


@needs_jdk
def test_ten_thousand_texts_of_the_tiny_vocabulary(jvm, tiny, ten_thousand):
    assert_same_ids(jvm, TINY / "target", tiny, ten_thousand)


@needs_jdk
@needs_gemma
def test_ten_thousand_texts_of_gemma(jvm, gemma, ten_thousand):
    assert_same_ids(jvm, GEMMA, gemma, ten_thousand)


@needs_jdk
@needs_gemma
def test_gemma_vocabulary_gives_the_ids_of_another_implementation(jvm):
    cases = json.loads((GEMMA / "tokenization_cases.json").read_text(encoding="utf-8"))
    assert len(cases) == 46
    assert ask(jvm, GEMMA, [case["text"] for case in cases]) == [case["ids"] for case in cases]


@needs_jdk
@needs_gemma
def test_gemma_vocabulary_is_read_in_a_small_heap(jvm, gemma):
    """Phones give an application a few hundred megabytes for everything."""
    small = Jvm(jvm.classes, heap="100m")
    assert_same_ids(small, GEMMA, gemma, ["Good morrow, my lord."])
    small.close()


@needs_jdk
@needs_gemma
def test_a_long_text_of_gemma(jvm, gemma):
    prose = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    assert_same_ids(jvm, GEMMA, gemma, [prose, prose.replace("\n", " "), "a" * 20_000, " " * 20_000])


@needs_jdk
def test_a_word_of_a_hundred_thousand_characters(jvm, tiny):
    """The time does not grow with the square of the length."""
    assert_same_ids(jvm, TINY / "target", tiny, ["and the king " * 8000, "e" * 100_000])


@pytest.fixture(scope="module")
def made_up(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, VOCAB)
    return folder


def bursts_of(rng: random.Random, ids: list[int]) -> list[list[int]]:
    bursts = []
    while ids:
        size = rng.randint(1, 6)
        bursts, ids = [*bursts, ids[:size]], ids[size:]
    return bursts


@needs_jdk
def test_streamed_pieces(jvm, made_up):
    """The same pieces at the same time, half a character never; also of bytes that are no text."""
    text, rng, cases = text_of(made_up), random.Random(0), []
    for _ in range(400):
        whole = [BYTES + byte for byte in rng.choice(["é", "€", "🙂", "नि", "e\u0301"]).encode()]
        kinds = [whole, [rng.randint(BYTES, PIECES - 1)], [rng.randint(PIECES, VOCAB + 5)], [rng.randint(0, 3)]]
        cases.append(bursts_of(rng, [token for _ in range(rng.randint(0, 12)) for token in rng.choice(kinds)]))
    for bursts, pieces in zip(cases, ask(jvm, made_up, stream=cases), strict=True):
        stream = TextStream(text)
        assert pieces == [*map(stream.push, bursts), stream.flush()]
        assert "".join(pieces) == text.decode([token for ids in bursts for token in ids])


@needs_jdk
def test_half_a_character_is_refused(jvm, made_up):
    for written, place in (("a\ud83d", 1), ("\ude00", 0), ("😀\udc00", 1)):
        with pytest.raises(Refused, match=rf"character {place} of the text is no Unicode character; give UTF-8 text"):
            ask(jvm, made_up, [written])


@needs_jdk
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": {"type": "NFC"}}, "normalizer {'type': 'NFC'} is not supported"),
        ({"pre_tokenizer": {"type": "ByteLevel"}}, "pre_tokenizer {'type': 'ByteLevel'} is not"),
        ({"decoder": None}, "decoder None is not supported"),
        ({"model/type": "Unigram"}, "model type 'Unigram' is not supported"),
        ({"model/byte_fallback": False}, "model byte_fallback False is not"),
        ({"model/dropout": 0.1}, "model dropout 0.1 is not supported"),
        ({"model/ignore_merges": True}, "model ignore_merges True is not"),
        ({"model/merges": [["<0x41>", "x"]]}, "merge 0 needs the token 'x', which the vocabulary has not"),
        ({"added_tokens/0/lstrip": True}, "added token '<pad>' is lstrip, which is not supported"),
        ({"model/vocab/<0x41>": 1.5}, "vocab: expected int, got '1.5'"),
        ({"model/vocab/<0x41>": REMOVED, "model/vocab/\ud800": 4}, "token 4 is no Unicode text"),
        ({"model/merges": REMOVED}, "the model has no merges"),
        (
            {"model/vocab/<0x41><0x42>": VOCAB, "model/merges": [["<0x41>", "<0x42>"], "<0x41> <0x42>"]},
            "merges of two forms",
        ),
        ({"decoder": REMOVED}, "it has no decoder"),
        ({"version": "2.0"}, "version '2.0' is not supported"),
        ({"more": 1}, "a tokenizer has no 'more'"),
        ({"added_tokens/0/special": REMOVED}, "added token '<pad>' does not say whether it is special"),
        ({"added_tokens/0/content": "<new>"}, "token '<pad>' or its id 0 comes twice"),
        (
            {"added_tokens/0/content": "<new>", "added_tokens/0/id": VOCAB + 9},
            f"added token '<new>' has the id {VOCAB + 9}, and {VOCAB} comes next",
        ),
        ({"normalizer": None, "pre_tokenizer": SPACES}, "a pre_tokenizer that splits at spaces is not supported"),
        ({"post_processor": NESTED}, "objects and arrays are nested deeper than 200"),
    ],
)
def test_other_tokenizers_are_refused_by_name(jvm, tmp_path, changes, message):
    write_tokenizer(tmp_path, VOCAB)
    edit_json(tmp_path / "tokenizer.json", changes)
    with pytest.raises(Refused) as refused:
        ask(jvm, tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / 'tokenizer.json'}: {message}"), refused.value


@needs_jdk
def test_bytes_that_are_no_text_are_refused(jvm, tmp_path):
    write_tokenizer(tmp_path, VOCAB)
    whole = (tmp_path / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole.replace(b"<0x41>", b"<0x\xff>", 1))
    with pytest.raises(Refused, match=r"tokenizer.json: it is no UTF-8 text"):
        ask(jvm, tmp_path)


@needs_jdk
def test_a_cut_tokenizer_is_refused_with_its_place(jvm, tmp_path):
    write_tokenizer(tmp_path, VOCAB)
    whole = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(whole[:-3], encoding="utf-8")
    with pytest.raises(Refused, match=r"Expecting .* line 1 column \d+"):
        ask(jvm, tmp_path)
