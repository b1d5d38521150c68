"""Chats render as in Transformers: the same text and the same ids, for the tiny pair's tokenizer and template, for Gemma's
own and for templates that use everything the environment offers. What goes wrong in a template is one line."""

import json

import pytest

from export.special_tokens import special_tokens
from runtime_py import manifest as contract
from runtime_py.text import TEMPLATE, Text

from .edits import edit_json
from .pairs import TINY, copy_pair, write_tokenizer
from .texts import GEMMA, NAMED, PIECES, TOKENS, VOCAB, chat_text, hf_tokenizer, needs_gemma, text_of

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  <b>Où</b> est-ce ? \n"},
    {"role": "assistant", "content": "Là-bas 🙂"},
    {"role": "user", "content": "Merci & \"adieu\" 'Z'"},
]
ASKED = {"role": "user", "content": "How warm is it in Zürich?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The weather "now", in {a} place',
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "Name of the city"},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                    "days": {"type": "array", "items": {"type": "integer"}, "nullable": True},
                    "options": {"type": "object", "properties": {"wind": {"type": "boolean"}}, "required": ["wind"]},
                },
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "description": "", "parameters": {"type": "object"}}},
]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "arguments": {"place": 'Zürich, "ZH" {x}', "days": [1, 2], "options": {"wind": True, "at": 1.5e-7}},
            },
        }
    ],
}
RESPONSE = {"role": "tool", "tool_responses": [{"name": "get_weather", "response": {"degrees": 21.5, "sky": "clear"}}]}
SPECIAL_TEXT = 'a <|turn>model\n<turn|><|"|>{}<|image|><bos> <0x41> <|channel>thought\nno<channel|> b'
CHATS = {
    "one message": MESSAGES[1:2],
    "system": MESSAGES[:2],
    "turns": MESSAGES,
    "thought in history": [
        ASKED,
        {"role": "assistant", "content": "<|channel>thought\nhm<channel|>21.", "reasoning": "hm"},
        ASKED,
    ],
    "unicode": [{"role": "user", "content": "नमस्ते 👩‍👩‍👧 e\u0301 \u200b\u2028 \ufffd 𒀀"}],
    "special token text": [{"role": "user", "content": SPECIAL_TEXT}],
    "empty": [{"role": "user", "content": ""}],
}
TOOL_CHATS = {
    "call": [ASKED, CALL, RESPONSE],
    "call and answer": [ASKED, CALL, RESPONSE, {"role": "assistant", "content": "21.5 degrees."}, ASKED],
    "plain response": [ASKED, CALL, {"role": "tool", "tool_responses": [{"name": "f", "response": "warm"}]}],
    "arguments as text": [
        ASKED,
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "a:1"}}]},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "image"}]}],
}
TEMPLATES = {
    "turns": "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}",
    "block whitespace": "{% for m in messages %}\n    {% if loop.first %}\nfirst\n    {% endif %}\n{{ m.role }}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
    "{% if loop.index0 == 3 %}{% break %}{% endif %}{{ m.role }},{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}"
    "{{ messages[0] | tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true) }}{{ tools | tojson }}",
    "strftime_now": "{{ strftime_now('%Y-%m-%d') }}",
    "macro and namespace": "{% macro tag(x) %}<{{ x }}>{% endmacro %}{% set ns = namespace(n=0, self=1) %}"
    "{% for m in messages %}{% set ns.n = ns.n + ns.self %}{% endfor %}{{ tag(ns.n) }}{{ pad_token }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}{{ sep_token is defined }}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}\n{% set x = 2 %}{{ m.role }}{{ loop.index }}"
    "{% endgeneration %}\n{{ x }}{% endfor %}",
    "variables": "{{ enable_thinking is defined }}{{ enable_thinking | default(false) }}{{ documents }}{{ bos_token }}"
    "{{ tools is none }}{{ add_generation_prompt }}",
    "dict": "{{ dict(a=1) }}{{ dict.fromkeys(['a', 'b'], 2) }}{{ dict.fromkeys('a') }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content is defined }}{{ m.thinking }}{{ m.content is defined }}{% endfor %}",
}
VARIABLES = {
    "none": {},
    "thinking": {"enable_thinking": True},
    "thinking off": {"enable_thinking": False},
    "documents": {"documents": [{"title": "T", "text": "t"}], "bos_token": "<eos>"},
}


def assert_as_in_transformers(ours: Text, tokenizer, template: str, messages: list[dict], **settings) -> None:
    """settings: tools, add_generation_prompt and template variables"""
    own = {name: settings.pop(name) for name in ("tools", "add_generation_prompt") if name in settings}
    hf = {"add_generation_prompt": True, "chat_template": template, **own, **settings}
    expected = tokenizer.apply_chat_template(messages, tokenize=False, **hf)
    assert ours.render_chat(messages, variables=settings, **own) == expected
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **hf)
    assert ours.encode_chat(messages, variables=settings, **own) == ids


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("chat", ["one message", "turns", "thought in history"])
@pytest.mark.parametrize("variables", VARIABLES.values(), ids=VARIABLES)
def test_environment_is_that_of_transformers(tmp_path, template, chat, variables):
    ours = chat_text(tmp_path, template)
    assert_as_in_transformers(ours, hf_tokenizer(tmp_path), template, CHATS[chat], **variables)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_tiny_chat_renders_as_in_transformers(tiny, chat, add_generation_prompt):
    folder = TINY / "target"
    template = (folder / TEMPLATE).read_text(encoding="utf-8")
    settings = {"add_generation_prompt": add_generation_prompt}
    assert_as_in_transformers(tiny, hf_tokenizer(folder), template, CHATS[chat], **settings)


@needs_gemma
@pytest.mark.parametrize("messages", [*CHATS.values(), *TOOL_CHATS.values()], ids=[*CHATS, *TOOL_CHATS])
def test_gemma_chat_renders_as_in_transformers(gemma, messages):
    tokenizer = hf_tokenizer(GEMMA)
    template = (GEMMA / TEMPLATE).read_text(encoding="utf-8")
    for variables in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        for tools in (None, TOOLS):
            assert_as_in_transformers(gemma, tokenizer, template, messages, tools=tools, **variables)
    assert_as_in_transformers(gemma, tokenizer, template, messages, add_generation_prompt=False)


@needs_gemma
def test_gemma_chat_has_one_bos_its_turns_its_tools_and_no_thought(gemma):
    ids = gemma.encode_chat(CHATS["thought in history"], TOOLS, variables={"enable_thinking": True})
    assert (ids[0], ids.count(2)) == (2, 1)
    assert (ids.count(105), ids.count(46), ids.count(98), ids.count(100)) == (5, 2, 1, 0)
    assert "hm" not in gemma.decode(ids)
    assert gemma.encode_chat(CHATS["one message"])[-2:] == gemma.encode_prompt("<|channel>thought\n<channel|>")[-2:]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ raise_exception('') }}", "TemplateError"),
        ("a\n{% for %}", "line 2: Expected an expression"),
        ("{% generation %}", "line 1: Unexpected end of template"),
        ("{{ messages[0].content.nothing.deeper }}", "has no attribute 'nothing'"),
        ("{{ messages.append(1) }}", "attribute 'append' of 'list' object is unsafe"),
        ("{{ dict.update(messages[0], a=1) }}", "has no attribute 'update'"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "no name with an underscore in front, got '_x'"),
        ("{% set n = namespace(__class__=1) %}", "no name with an underscore in front"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages | nofilter }}", "line 1: No filter named 'nofilter'"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("\udcff\udcfe garbage", "codec can't decode byte"),
    ],
)
def test_bad_template_is_an_error_of_one_line(tmp_path, template, message):
    write_tokenizer(tmp_path, VOCAB)
    (tmp_path / TEMPLATE).write_bytes(template.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message) as error:
        text_of(tmp_path).encode_chat(CHATS["one message"])
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{tmp_path / TEMPLATE}: ")


def nested(depth: int) -> list:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("messages", "settings", "message"),
    [
        ([], {}, "the conversation is empty"),
        (["hello"], {}, r"messages\[0\]: expected an object, got str"),
        ([{"role": "user", "content": {1}}], {}, r"messages\[0\].content: set is no JSON value"),
        ([{"role": "user", 1: "a"}], {}, r"messages\[0\]: dict is no JSON value"),
        ([{"role": "user", "content": nested(200)}], {}, r"messages\[0\]: .* nested deeper than 100"),
        ([ASKED], {"tools": [print]}, r"tools\[0\]: expected an object, got builtin_function"),
        ([ASKED], {"variables": {"x": object()}}, "variables.x: object is no JSON value"),
        ([ASKED], {"variables": {"tools": []}}, "'tools' has its own argument"),
        ([{"role": "user", "content": "a\udcff"}], {}, "is no Unicode character"),
    ],
)
def test_what_is_no_chat_is_refused(tmp_path, messages, settings, message):
    ours = chat_text(tmp_path, "{{ messages[0].content }}")
    with pytest.raises(ValueError, match=message) as error:
        ours.encode_chat(messages, **settings)
    assert TEMPLATE not in str(error.value)


def test_a_template_does_not_reach_the_messages_of_the_caller(tmp_path):
    ours = chat_text(
        tmp_path, "{% set messages = messages[0] %}{{ messages.content[0] }}{{ messages.name is defined }}"
    )
    message = {"role": "user", "content": ["a"], "name": None}
    assert ours.render_chat([message]) == "aFalse"
    assert message == {"role": "user", "content": ["a"], "name": None}


def test_bundle_without_a_template_refuses_a_chat(tmp_path):
    write_tokenizer(tmp_path, VOCAB)
    with pytest.raises(ValueError, match=r"has no chat template; use a raw prompt"):
        text_of(tmp_path).encode_chat(MESSAGES)


# The special-token map of the manifest.


def test_bundle_names_the_special_tokens_of_its_checkpoint(bundle_of):
    bundle = bundle_of("tiny", "int8")
    manifest = contract.load(bundle)
    assert manifest.tokens.special == {**NAMED, "mask_token": "<mask>"}
    ids = hf_tokenizer(TINY / "target").apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert Text(bundle, manifest).encode_chat(MESSAGES) == ids


def test_special_tokens_are_those_that_transformers_names(pair_of, tmp_path):
    folder, _ = copy_pair(pair_of("tiny"), tmp_path)
    edit_json(folder / "tokenizer_config.json", {"stc_token": "<|tool_call>", "eos_token": "<turn|>"})
    (folder / "special_tokens_map.json").write_text(json.dumps({"sep_token": {"content": "<|turn>", "lstrip": False}}))
    got = special_tokens(folder, {"bos_token": 3, "pad_token": 3})
    assert got == hf_tokenizer(folder).special_tokens_map
    assert (got["stc_token"], got["eos_token"], got["bos_token"]) == ("<|tool_call>", "<turn|>", "<bos>")


def test_a_tokenizer_that_names_no_bos_has_that_of_the_generation_config(pair_of, tmp_path):
    folder, _ = copy_pair(pair_of("tiny"), tmp_path)
    (folder / "tokenizer_config.json").unlink()
    assert special_tokens(folder, {"bos_token": 2, "pad_token": 4}) == {"bos_token": "<bos>", "pad_token": "<mask>"}


@pytest.mark.parametrize("content", ["{", '{"bos_token": 5}', '{"extra_special_tokens": 3}'])
def test_tokenizer_that_transformers_refuses_is_named(pair_of, tmp_path, content):
    folder, _ = copy_pair(pair_of("tiny"), tmp_path)
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match="no tokenizer that Transformers can build") as error:
        special_tokens(folder, {})
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("added", [True, False], ids=["added token", "ordinary token"])
def test_a_named_token_is_special_whatever_the_tokenizer_says(tmp_path, added):
    """As in Transformers: its text is one token, and decoding leaves it out."""
    write_tokenizer(tmp_path, VOCAB)
    token, content = VOCAB - 1, f"\u2581piece{VOCAB - 1 - PIECES}"
    if added:
        tokenizer = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
        entry = {**tokenizer["added_tokens"][0], "id": token, "content": content, "special": False}
        edit_json(tmp_path / "tokenizer.json", {"added_tokens": [*tokenizer["added_tokens"], entry]})
    assert text_of(tmp_path).decode([token]) == content.replace("\u2581", " ")
    named = contract.TokensSpec(TOKENS.bos, TOKENS.pad, TOKENS.eos, {**NAMED, "image_token": content, "x": "no token"})
    ours = text_of(tmp_path, tokens=named)
    assert ours.decode([token]) == "" and ours.is_skipped(token)
    assert ours.encode_prompt(f"a{content}")[-1] == token
    assert ours.tokenizer.get_vocab_size() == VOCAB
