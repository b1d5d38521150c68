"""A chat template as the pieces between messages: they give what the template gives, in Python and in Java, and a template
that is more than pieces gives none."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export.chat_turns import chat_turns, join_turns
from runtime_py import manifest as contract
from runtime_py.chat_template import ChatTemplate
from runtime_py.manifest import ChatSpec

from .jvm import needs_jdk
from .pairs import TINY
from .texts import GEMMA, NAMED, needs_gemma

TEMPLATES = {
    "tiny": TINY / "target/chat_template.jinja",
    "gemma": GEMMA / "chat_template.jinja",
    "raw": "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "no system": "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}[{{ m.role[0] }}] {{ m.content | trim }}\n{% endfor %}[a]",
    "system joins the question": "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}S: {{ m.content }}\n\n"
    "{% else %}{{ m.role }}: {{ m.content | trim }}\n{% endif %}{% endfor %}assistant:",
    "answers alone are stripped": "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content | trim if m.role == 'assistant' else m.content }}{% endfor %}<assistant>",
}


def each(said: str) -> str:
    return f"{{% for m in messages %}}<{{{{ m.role }}}}>{said}{{% endfor %}}<assistant>"


NOT_PIECES = {
    "dated": "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}",
    "numbered": "{% for m in messages %}{{ loop.index }}{{ m.role }}{{ m.content }}{% endfor %}",
    "upper case": "{% for m in messages %}{{ m.role }}{{ m.content | upper }}{% endfor %}",
    "last question alone": "{{ messages[-1].content }}",
    "by content": "{% for m in messages %}{{ m.role }}{{ m.content }}{{ '!' if m.content | length > 200 }}{% endfor %}",
    "left strip": "{% for m in messages %}{{ m.role }}{{ m.content.lstrip() }}{% endfor %}",
    "history is cut": "{% for m in messages[-3:] %}{{ m.role }}{{ m.content }}{% endfor %}",
    "empty refused": "{% for m in messages %}{{ m.role }}{{ m.content or raise_exception('empty') }}{% endfor %}",
    "broken": "{% for m in messages %}",
    "long history is cut": "{% for m in messages[-41:] %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>",
    "long history is told": f"{each('{{ m.content }}')}{{{{ 'long' if messages | length > 100 }}}}",
    "every 16th": each("{{ '---' if loop.index % 16 == 0 }}{{ m.content }}"),
    "thoughts in answers": each("{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"),
    "commands in questions": each("{{ m.content }}{{ '!' if m.content.startswith('/short') }}"),
    "markup in questions": each("{{ m.content | replace('<bos>', '') }}"),
    "long texts are cut": each("{{ m.content[:123456] }}"),
    "line ends": each("{{ m.content | replace('\\r\\n', '\\n') }}"),
    "repeated texts": each("{{ m.content if m.content != messages[loop.index0 - 2].content }}"),
}
WORDS = st.text(max_size=12) | st.sampled_from(
    ["", " ", "a\n\n b ", "\u2003x\u00a0", "\x1c\x85y\u180e", "🙂", "{{ x }}"]
)

MARKUP = ("<|channel>", "<channel|>")
ANSWERS = WORDS.filter(lambda text: "channel" not in text)  # Gemma's template cuts thoughts out of answers


def written(name: str) -> str:
    found = TEMPLATES[name]
    return found if isinstance(found, str) else found.read_text(encoding="utf-8")


@st.composite
def conversations(draw, spec: ChatSpec) -> list[dict[str, str]]:
    roles = ["user", *["assistant", "user"] * draw(st.integers(0, 3))]
    roles = ["system", *roles] if spec.system_start is not None and draw(st.booleans()) else roles
    return [{"role": role, "content": draw(WORDS if role != "assistant" else ANSWERS)} for role in roles]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=needs_gemma if name == "gemma" else ()) for name in TEMPLATES]
)
def case(request, tmp_path_factory) -> tuple[ChatSpec, ChatTemplate]:
    path = tmp_path_factory.mktemp("template") / "chat_template.jinja"
    path.write_text(written(request.param), encoding="utf-8")
    spec = chat_turns(written(request.param), NAMED, MARKUP)
    assert spec is not None
    assert (spec.system_start is None) == (request.param == "no system")
    return spec, ChatTemplate(path, NAMED)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_pieces_give_what_the_template_gives(case, data):
    spec, template = case
    chat = data.draw(conversations(spec))
    assert join_turns(spec, chat) == template.render(chat)


@needs_jdk
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_java_gives_what_the_template_gives(jvm, case, data):
    spec, template = case
    chats = data.draw(st.lists(conversations(spec), min_size=10, max_size=20))
    theirs = jvm.ask("chat", spec=dataclasses.asdict(spec), conversations=chats)
    assert theirs == [template.render(chat) for chat in chats]


@pytest.mark.parametrize("name", NOT_PIECES)
def test_templates_that_are_more_than_pieces(name):
    assert chat_turns(NOT_PIECES[name], NAMED) is None


def test_what_no_answer_holds_is_not_looked_for_in_one():
    template = NOT_PIECES["thoughts in answers"]
    assert chat_turns(template, NAMED, ["</think>"]) == chat_turns(each("{{ m.content }}"), NAMED)


def test_rules_of_roles():
    assert chat_turns(written("raw"), NAMED).stripped == ()
    assert chat_turns(written("no system"), NAMED).stripped == ("user", "assistant")
    assert chat_turns(written("answers alone are stripped"), NAMED).stripped == ("assistant",)


def test_a_bundle_holds_the_pieces(bundle_of):
    assert contract.load(bundle_of("tiny")).chat == chat_turns(written("tiny"), NAMED)


@needs_jdk
def test_java_refuses_what_is_no_conversation(jvm):
    spec = dataclasses.asdict(chat_turns(written("no system"), NAMED))
    system, question, answer = ({"role": role, "content": "x"} for role in ("system", "user", "assistant"))
    wrong = [[], [answer], [question, question], [question, answer], [system, question]]
    texts = jvm.ask("chat", spec=spec, conversations=[*wrong, [question]])
    assert [text.startswith("error: ") for text in texts] == [True] * len(wrong) + [False]
    with pytest.raises(ValueError, match="cannot be used here; use a raw prompt"):
        jvm.ask("chat", spec=None, conversations=[])
