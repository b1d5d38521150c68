"""Tool calls from token ids: what the chat template writes comes back as it was; what does not follow the grammar is kept as
written, with the reason."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_py.events import End, MalformedToolCall, TextDelta, ToolCall, assistant_message

from .texts import ids_of, needs_gemma, parse


def arguments_text(arguments: dict) -> str:
    """What the grammar says, written apart from the template."""
    return "{" + ",".join(f"{key}:{value_text(value)}" for key, value in arguments.items()) + "}"


def value_text(value: object) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return arguments_text(value)
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def call_text(name: str, arguments: dict) -> str:
    return f"<|tool_call>call:{name}{arguments_text(arguments)}<tool_call|>"


MALFORMED = {
    'a:<|"|>b': "it is not closed",
    "call:f{a:1": "it is not closed",
    "": "it is not closed",
    "call:f{a:1}<turn|>": "it is not closed",
    'call:f{a:<|"|>b<turn|>': "it is not closed",
    "call:f<tool_call|>": "it does not begin with call:name{",
    "call:{}<tool_call|>": "it does not begin with call:name{",
    'call:<|"|>f<|"|>{}<tool_call|>': "it does not begin with call:name{",
    "f{}<tool_call|>": "it does not begin with call:name{",
    '{"name": "f"}<tool_call|>': "it does not begin with call:name{",
    "call:f{}}<tool_call|>": "'}' follows the arguments",
    "call:f{a:b}<tool_call|>": "'b' where a value is expected",
    "call:f{a:True}<tool_call|>": "'True' where a value is expected",
    "call:f{a:01}<tool_call|>": "'01' where a value is expected",
    "call:f{a:nan}<tool_call|>": "'nan' where a value is expected",
    "call:f{a:1e999}<tool_call|>": "'1e999' is too large a number",
    f"call:f{{a:{'9' * 5000}}}<tool_call|>": f"'{'9' * 40}' where a value is expected",
    "call:f{a:}<tool_call|>": "'}' where a value is expected",
    "call:f{a:1 2}<tool_call|>": "'1 2' where a value is expected",
    "call:f{a:1,}<tool_call|>": "'}' is no key with a colon",
    "call:f{,a:1}<tool_call|>": "',' is no key with a colon",
    "call:f{a}<tool_call|>": "'a' is no key with a colon",
    'call:f{a<|"|>b<|"|>:1}<tool_call|>': "'a' is no key with a colon",
    "call:f{[1]}<tool_call|>": "'[' is no key with a colon",
    "call:f{a:[1,]}<tool_call|>": "']' where a value is expected",
    "call:f{a:[1}<tool_call|>": "'}' where ',' or ']' is expected",
    'call:f{a:<|"|>b<|"|>c}<tool_call|>': "'c' where ',' or '}' is expected",
    "call:f{a:1<tool_call|>": "the end where ',' or '}' is expected",
    "call:f{<tool_call|>": "the end is no key with a colon",
    "call:f{a:1,a:2}<tool_call|>": "key 'a' is given twice",
    "call:f{a:<pad>1}<tool_call|>": "a special token stands outside of a string",
    "call:f{<|channel>a:1}<tool_call|>": "a special token stands outside of a string",
    f"call:f{{a:{'[' * 5000}{']' * 5000}}}<tool_call|>": "objects and arrays are nested deeper than 100",
}


@pytest.mark.parametrize(("body", "reason"), MALFORMED.items(), ids=range(len(MALFORMED)))
def test_malformed_calls_are_kept_as_written_with_the_reason(tiny, body, reason):
    written = f"<|tool_call>{body}"
    events = parse(tiny, [*ids_of(tiny, "a"), *ids_of(tiny, written)])
    kept = MalformedToolCall(written.removesuffix("<turn|>"), reason)
    assert events == [TextDelta("a"), kept, End("tool_call" if reason == "it is not closed" else None)]


def test_a_call_goes_on_after_a_malformed_one(tiny):
    written = "<|tool_call>call:f{a<|tool_call>call:g{}<tool_call|>b"
    expected = [
        MalformedToolCall("<|tool_call>call:f{a", "it is not closed"),
        ToolCall("g", {}),
        TextDelta("b"),
        End(None),
    ]
    assert parse(tiny, ids_of(tiny, written)) == expected


# Round trips: a call as the template writes it gives its name and arguments.

TEXTS = st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        '"',
        "'",
        "}",
        "{a:1}",
        ",",
        ":",
        "[",
        "\\",
        "\n",
        "<tool_call|>",
        "<|tool_call>call:",
        "<|channel>",
        "<pad>",
        "<bos>",
        "<turn|>",
    ]
)
KEYS = st.from_regex(r"\A[A-Za-z_][\w .-]{0,8}(?<! )\Z") | st.sampled_from(["é", "$x", "a b"])
VALUES = st.recursive(
    TEXTS | st.booleans() | st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"\A[A-Za-z_][\w.:-]{0,12}\Z", fullmatch=True)


@settings(max_examples=300, deadline=None)
@given(name=NAMES, arguments=st.dictionaries(KEYS, VALUES, max_size=4), burst=st.integers(1, 8))
def test_calls_of_the_grammar_come_back(tiny, name, arguments, burst):
    ids = ids_of(tiny, f"a{call_text(name, arguments)}b")
    assert parse(tiny, ids, burst) == [TextDelta("a"), ToolCall(name, arguments), TextDelta("b"), End(None)]


@needs_gemma
@settings(max_examples=60, deadline=None)
@given(calls=st.lists(st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=4)), min_size=1, max_size=3))
def test_calls_that_gemmas_template_writes_come_back(gemma, calls):
    history = [{"role": "user", "content": "a"}]
    message = assistant_message([ToolCall(name, arguments) for name, arguments in calls])
    before = gemma.encode_chat(history, add_generation_prompt=False)
    ids = gemma.encode_chat([*history, message], add_generation_prompt=False)
    turn = ids_of(gemma, "<|turn>model\n")
    assert ids[: len(before) + len(turn)] == [*before, *turn]
    events = parse(gemma, ids[len(before) + len(turn) :])
    assert [event for event in events if not isinstance(event, TextDelta)] == [
        *(ToolCall(name, arguments) for name, arguments in calls),
        End(None),
    ]
    assert assistant_message(events[: len(calls)]) == message
