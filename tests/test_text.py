"""Text at the edge: streamed pieces make up what the ids decode to, a prompt gets exactly one bos, and Gemma's own
vocabulary gives the ids that another implementation gives."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from runtime_py import manifest as contract
from runtime_py.manifest import FileSpec
from runtime_py.text import TEMPLATE, Text, TextStream

from .pairs import write_tokenizer
from .texts import BYTES, GEMMA, PIECES, TOKENS, VOCAB, chat_text, needs_gemma, text_of


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Text:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, VOCAB)
    return text_of(folder)


def stream(text: Text, bursts: list[list[int]]) -> list[str]:
    pieces = TextStream(text)
    return [*(pieces.push(tuple(ids)) for ids in bursts), pieces.flush()]


def utf8(characters: str | bytes) -> list[int]:
    return [BYTES + byte for byte in (characters.encode() if isinstance(characters, str) else characters)]


@pytest.mark.parametrize("burst", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "characters",
    ["é", "€", "🙂", "🇩🇪", "👩‍👩‍👧", "e\u0301", "नि", "a🙂b"],
    ids=["2 bytes", "3 bytes", "4 bytes", "flag", "joined emoji", "combining", "vowel sign", "mixed"],
)
def test_character_split_over_tokens_comes_whole(text, characters, burst):
    ids = [PIECES, *utf8(characters), PIECES + 1]
    pieces = stream(text, [ids[i : i + burst] for i in range(0, len(ids), burst)])
    assert "".join(pieces) == f" piece0{characters} piece1"
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_incomplete_character_at_the_end_is_flushed_as_decoded(text, cut):
    ids = [PIECES, *utf8("🙂")[:cut]]
    pieces = stream(text, [[token] for token in ids])
    assert pieces == [" piece0", *[""] * cut, "\ufffd" * cut]
    assert "".join(pieces) == text.decode(ids)


@pytest.mark.parametrize(
    "ids",
    [
        utf8(b"\xff"),
        utf8(b"\x80\x80"),
        [*utf8(b"\xe2\x82"), PIECES],  # cut by a piece
        [*utf8("€"), *utf8(b"\x80"), PIECES],  # a whole character that its run makes invalid
        [*utf8(b"\xe2\x82"), 0, *utf8(b"\xac"), PIECES],  # decoding skips the special token inside
        [PIECES, *utf8(b"\xc3\x28"), *utf8("é")],
        [1, 2, 0, 3],
        [],
    ],
)
def test_invalid_bytes_and_special_tokens_stream_as_they_decode(text, ids):
    assert "".join(stream(text, [[token] for token in ids])) == text.decode(ids)


@settings(max_examples=300, deadline=None)
@given(
    bursts=st.lists(
        st.lists(
            st.one_of(st.integers(BYTES, PIECES - 1), st.integers(PIECES, VOCAB + 5), st.integers(0, 3)),
            min_size=1,
            max_size=8,
        ),
        max_size=12,
    )
)
def test_streamed_pieces_make_up_the_decoded_text(text, bursts):
    assert "".join(stream(text, bursts)) == text.decode([token for ids in bursts for token in ids])


@needs_gemma
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 262143) | st.integers(238, 493), max_size=40), burst=st.integers(1, 8))
def test_streamed_pieces_make_up_the_decoded_text_of_gemma(gemma, ids, burst):
    assert "".join(stream(gemma, [ids[i : i + burst] for i in range(0, len(ids), burst)])) == gemma.decode(ids)


@pytest.mark.parametrize("prompt", ["abc", "<bos>abc", "<bos>", "\n🙂"])
def test_raw_prompt_has_exactly_one_bos(text, prompt):
    ids = text.encode_prompt(prompt)
    assert ids[0] == TOKENS.bos
    assert ids.count(TOKENS.bos) == 1
    assert text.decode(ids) == prompt.removeprefix("<bos>")


@pytest.mark.parametrize("prompt", ["", "a\udcff"])
def test_prompt_that_is_no_text_is_refused(text, prompt):
    with pytest.raises(ValueError, match=r"prompt is empty|character 1 of the text"):
        text.encode_prompt(prompt)


@pytest.mark.parametrize("name", ["tokenizer.json", TEMPLATE])
def test_missing_or_cut_text_file_is_refused(tmp_path, name):
    ours = chat_text(tmp_path, "{{ bos_token }}")
    files = {path.name: FileSpec("", path.stat().st_size) for path in tmp_path.iterdir()}
    manifest = SimpleNamespace(tokens=ours.tokens, files=files, target=SimpleNamespace(vocab_size=VOCAB))
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{name}: has \d+ bytes, the manifest says {files[name].size_bytes}"):
        Text(tmp_path, manifest)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"{name}: file is missing"):
        Text(tmp_path, manifest)


@pytest.mark.parametrize(
    ("content", "vocab", "message"),
    [(b"{}", VOCAB, "tokenizer.json"), (None, VOCAB - 1, "300 tokens, the model has 299")],
)
def test_unfit_tokenizer_is_refused(tmp_path, content, vocab, message):
    write_tokenizer(tmp_path, VOCAB)
    if content:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        text_of(tmp_path, vocab)


@needs_gemma
def test_gemma_vocabulary_gives_the_ids_of_another_implementation(gemma):
    cases = json.loads((GEMMA / "tokenization_cases.json").read_text(encoding="utf-8"))
    assert len(cases) == 46
    for case in cases:
        if case["text"]:
            assert gemma.encode_prompt(case["text"]) == [TOKENS.bos, *case["ids"]], case["text"]
            assert gemma.decode(case["ids"]) == case["text"]


def test_truncation_and_padding_of_a_saved_tokenizer_are_not_applied(bundle_of, tmp_path):
    bundle = Path(shutil.copytree(bundle_of("tiny", "int8"), tmp_path / "bundle"))
    want = Text(bundle, contract.load(bundle)).encode_prompt("ROMEO: what light?")
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(bundle / "tokenizer.json"))
    manifest = contract.load(bundle)
    size = FileSpec("", (bundle / "tokenizer.json").stat().st_size)
    manifest = dataclasses.replace(manifest, files={**manifest.files, "tokenizer.json": size})
    assert Text(bundle, manifest).encode_prompt("ROMEO: what light?") == want
