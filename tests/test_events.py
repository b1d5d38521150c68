"""Events from token ids: nothing a model may write is lost, shown half, shown as markup or raises, whatever the bursts; calls
that the chat template writes come back as they were."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_py.events import (
    End,
    EventParser,
    TextDelta,
    ThoughtDelta,
    ToolCall,
    assistant_message,
)
from runtime_py.text import TEMPLATE

from .pairs import TINY, write_tokenizer
from .texts import (
    BYTES,
    GEMMA,
    NAMED,
    PIECES,
    VOCAB,
    hf_tokenizer,
    ids_of,
    joined,
    needs_gemma,
    parse,
    spelled,
    text_of,
)

SPECIAL = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
OTHERS = ("<pad>", "<bos>", "<unk>", "<|turn>", "<|think|>", "<|tool>", "<tool_response|>", "<mask>")
PLACEHOLDERS = ("<|image|>", "<|audio|>", "<|video|>", "<|image>", "<image|>", "<|audio>", "<audio|>")


# What is written and what comes out.

WRITTEN = {
    "text": ("Good day.", [TextDelta("Good day.")]),
    "thought": ("<|channel>thought\nhm, é\n<channel|>Yes.", [ThoughtDelta("hm, é\n"), TextDelta("Yes.")]),
    "empty thought": ("<|channel>thought\n<channel|>Yes.", [TextDelta("Yes.")]),
    "label only": ("<|channel>thought<channel|>Yes.", [TextDelta("Yes.")]),
    "empty channel": ("<|channel><channel|>Yes.", [TextDelta("Yes.")]),
    "another label": ("<|channel>final\nhm<channel|>", [ThoughtDelta("final\nhm")]),
    "label inside": ("<|channel>thoughts\nhm<channel|>", [ThoughtDelta("thoughts\nhm")]),
    "begun label": ("<|channel>thou<channel|>", [ThoughtDelta("thou")]),
    "two channels": ("<|channel>thought\na<|channel>thought\nb<channel|>c", [ThoughtDelta("ab"), TextDelta("c")]),
    "end without begin": ("a<channel|>b<tool_call|>c", [TextDelta("abc")]),
    "call": ("<|tool_call>call:f{}<tool_call|>", [ToolCall("f", {})]),
    "call between": (
        'a<|tool_call>call:f{x:1}<tool_call|>b"',
        [TextDelta("a"), ToolCall("f", {"x": 1}), TextDelta('b"')],
    ),
    "call in a thought": (
        "<|channel>thought\na<|tool_call>call:f{}<tool_call|>b<channel|>c",
        [ThoughtDelta("a"), ToolCall("f", {}), ThoughtDelta("b"), TextDelta("c")],
    ),
    "call in a label": (
        "<|channel>thou<|tool_call>call:f{}<tool_call|>ght\n",
        [ThoughtDelta("thou"), ToolCall("f", {}), ThoughtDelta("ght\n"), End("thought")],
    ),
    "two calls": (
        '<|tool_call>call:f{}<tool_call|><|tool_call>call:g.h{a:<|"|><|"|>}<tool_call|><|tool_response>',
        [ToolCall("f", {}), ToolCall("g.h", {"a": ""})],
    ),
    "values": (
        '<|tool_call>call:f{a:true,b:false,c:None,d:null,e:-1.5e-7,f:[[],{}],g:{h:{i:[1,<|"|>2<|"|>]}},:0}<tool_call|>',
        [
            ToolCall(
                "f",
                {
                    "a": True,
                    "b": False,
                    "c": None,
                    "d": None,
                    "e": -1.5e-7,
                    "f": [[], {}],
                    "g": {"h": {"i": [1, "2"]}},
                    "": 0,
                },
            )
        ],
    ),
    "spaces and quoted keys": (
        '<|tool_call> call: f { <|"|>a:}<|"|> : 1 ,\n b c : [ 2 , 3 ] } <tool_call|>',
        [ToolCall("f", {"a:}": 1, "b c": [2, 3]})],
    ),
    "markup in a string": (
        '<|tool_call>call:f{a:<|"|>},b:1}<tool_call|> <|tool_call>call:g{<|channel>\n"\'\\<pad><|"|>}<tool_call|>.',
        [ToolCall("f", {"a": "},b:1}<tool_call|> <|tool_call>call:g{<|channel>\n\"'\\<pad>"}), TextDelta(".")],
    ),
    "unclosed thought": ("<|channel>thought\nhm", [ThoughtDelta("hm"), End("thought")]),
    "unclosed label": ("<|channel>tho", [ThoughtDelta("tho"), End("thought")]),
    "stopped thought": ("<|channel>thought\nhm<turn|>", [ThoughtDelta("hm"), End("thought")]),
    "bare channel": ("a<|channel>", [TextDelta("a"), End("thought")]),
}


@pytest.mark.parametrize(("written", "expected"), WRITTEN.values(), ids=WRITTEN)
def test_events_of_what_is_written(tiny, written, expected):
    ids = ids_of(tiny, written)
    expected = expected if isinstance(expected[-1], End) else [*expected, End(None)]
    assert parse(tiny, ids) == expected
    for burst in (2, 3, 8, len(ids)):
        assert parse(tiny, ids, burst) == expected


@pytest.mark.parametrize(
    "written", [*SPECIAL, *OTHERS, "<|channel>thought\nx<channel|>", '<|tool_call>call:f{a:<|"|>b<|"|>}<tool_call|>']
)
def test_markup_spelled_in_ordinary_tokens_is_text(tiny, written):
    assert parse(tiny, spelled(tiny, written)) == [TextDelta(written), End(None)]
    inside = [*ids_of(tiny, '<|tool_call>call:f{a:<|"|>'), *spelled(tiny, written), *ids_of(tiny, '<|"|>}<tool_call|>')]
    assert parse(tiny, inside) == [ToolCall("f", {"a": written}), End(None)]


def test_no_special_token_is_shown(tiny):
    for written in OTHERS:
        assert parse(tiny, ids_of(tiny, f"a{written}b<|channel>thought\nc{written}d<channel|><turn|>")) == [
            TextDelta("ab"),
            ThoughtDelta("cd"),
            End(None),
        ]


@needs_gemma
@pytest.mark.parametrize("written", [*OTHERS, *PLACEHOLDERS])
def test_no_special_token_of_gemma_is_shown(gemma, written):
    ids = ids_of(gemma, f"a{written}b")
    assert len(ids) == 3 and parse(gemma, ids) == [TextDelta("ab"), End(None)]


def test_a_stop_token_is_not_shown_even_if_the_tokenizer_has_it_as_text(tmp_path):
    write_tokenizer(tmp_path, VOCAB)
    ours = text_of(tmp_path)
    assert 106 in ours.tokens.eos and not ours.is_skipped(106)
    assert parse(ours, [PIECES, 106]) == [TextDelta(" piece0"), End(None)]


def test_without_the_tokens_of_markup_everything_is_text(tmp_path):
    write_tokenizer(tmp_path, VOCAB)
    ours = text_of(tmp_path)
    written = "<|channel>thought\nx<channel|><|tool_call>call:g{a:1}<tool_call|>"
    assert parse(ours, [BYTES + byte for byte in written.encode()]) == [TextDelta(written), End(None)]


def test_markup_of_which_a_part_is_missing_is_none(tmp_path):
    """Channels without calls: the tokens of calls are passed over, as decoding does."""
    tokenizer = json.loads((TINY / "target/tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] != "<tool_call|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    ours = text_of(tmp_path, 1024)
    written = "<|channel>thought\na<channel|>b<|tool_call>call:f{}"
    assert parse(ours, ids_of(ours, written)) == [ThoughtDelta("a"), TextDelta("bcall:f{}"), End(None)]


# Whatever the ids and the bursts.

WORDS = [*SPECIAL, *OTHERS, "thought\n", "call:f{", "}", "a:", ",", "[", "]", "1", "é", "🙂", " the", "\n", "<turn|>"]


@pytest.fixture(scope="module")
def any_ids(tiny) -> st.SearchStrategy[list[int]]:
    words = st.sampled_from([ids_of(tiny, word) for word in WORDS])
    return st.lists(words | st.integers(0, 1030).map(lambda token: [token]), max_size=40).map(
        lambda parts: [*itertools.chain(*parts)]
    )


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_events_do_not_depend_on_bursts_and_lose_nothing(tiny, any_ids, data):
    ids = data.draw(any_ids)
    bursts = data.draw(st.lists(st.integers(1, 8), min_size=len(ids), max_size=len(ids)))
    expected = parse(tiny, ids)
    parser, events, at = EventParser(tiny), [], 0
    for burst in bursts:
        events += parser.push(tuple(ids[at : at + burst]))
        at += burst
    assert joined([*events, *parser.finish()]) == expected
    assert [type(event) for event in expected].count(End) == 1 and isinstance(expected[-1], End)
    shown = "".join(event.text for event in expected if isinstance(event, TextDelta | ThoughtDelta))
    markup = {tiny.special_id(content) for content in SPECIAL}
    if not markup & set(ids):
        assert shown == tiny.decode([token for token in ids if token not in tiny.tokens.eos])


@settings(max_examples=200, deadline=None)
@given(
    written=st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"]), max_size=20),
    cut=st.integers(1, 8),
)
def test_characters_come_whole_in_text_and_thoughts(tiny, written, cut):
    plain = spelled(tiny, written)
    ids = [*ids_of(tiny, "<|channel>thought\n"), *plain, *ids_of(tiny, "<channel|>"), *plain]
    parser, events = EventParser(tiny), []
    for i in range(0, len(ids), cut):
        events += parser.push(ids[i : i + cut])
    events += parser.finish()
    assert all(event.text in written for event in events[:-1])
    assert joined(events) == [*([ThoughtDelta(written), TextDelta(written)] if written else []), End(None)]


# History.


def test_message_for_the_history_has_no_thought_and_calls_in_openai_form(tiny):
    written = "<|channel>thought\nhm<channel|>I ask.<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{}<tool_call|>"
    assert assistant_message(parse(tiny, ids_of(tiny, f"{written}<|tool_call>call:")), first_call=3) == {
        "role": "assistant",
        "content": "I ask.",
        "tool_calls": [
            {"id": "call_3", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
            {"id": "call_4", "type": "function", "function": {"name": "g", "arguments": {}}},
        ],
    }
    assert assistant_message(parse(tiny, ids_of(tiny, "Yes."))) == {"role": "assistant", "content": "Yes."}


@needs_gemma
def test_answer_in_the_history_renders_as_transformers_renders_it(gemma):
    written = '<|channel>thought\nhm<channel|>I ask.<|tool_call>call:f{a:<|"|>b<|"|>}<tool_call|>'
    chat = [{"role": "user", "content": "a"}, assistant_message(parse(gemma, ids_of(gemma, written)))]
    template = (GEMMA / TEMPLATE).read_text(encoding="utf-8")
    expected = hf_tokenizer(GEMMA).apply_chat_template(chat, chat_template=template, tokenize=False)
    assert gemma.render_chat(chat, add_generation_prompt=False) == expected
    assert "hm" not in expected and NAMED["bos_token"] in expected


def test_a_long_answer_costs_the_same_for_each_token(tiny, monkeypatch):
    """Counted in ids decoded and looked at: each once, however long the text, the run of bytes or the call."""
    decoded, looked_at = [], []
    decode, decode_all, is_byte = tiny.decode, tiny.decode_all, tiny.is_byte
    monkeypatch.setattr(tiny, "decode", lambda ids: (decoded.extend(ids), decode(ids))[1])
    monkeypatch.setattr(tiny, "decode_all", lambda ids: (decoded.extend(ids), decode_all(ids))[1])
    monkeypatch.setattr(tiny, "is_byte", lambda token: (looked_at.append(token), is_byte(token))[1])
    strings = ",".join(['<|"|>c d<|"|>'] * 300)
    thought = f"<|channel>thought\n{'b ' * 500}<channel|>"
    ids = ids_of(tiny, f"{'a ' * 500}{'🙂' * 500}{thought}<|tool_call>call:f{{x:[{strings}]}}<tool_call|>")
    assert parse(tiny, ids)[2] == ToolCall("f", {"x": ["c d"] * 300})
    assert len(ids) > 4000 and len(decoded) <= len(ids) and len(looked_at) <= len(ids)
