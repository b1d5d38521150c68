"""A chat template as the few texts that stand between the messages of a conversation, for hosts without jinja.

The template is rendered with markers in the places of messages, what stands between them is cut out, and the pieces are held
against the template on many conversations: among them every text that the template names, for it may look for that in a
message, and as many messages and characters as the numbers that it names. A template that is more than pieces (a date, a
rule about contents) gives none.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

from jinja2 import Environment
from transformers.utils.chat_template_utils import render_jinja_template

from runtime_py.manifest import ChatSpec

ROLES = ("system", "user", "assistant")
MARKERS = tuple(f"[[{name}]]" for name in ("system", "question", "answer", "question again"))
PADDED = " \n\t{} \u3000\n "
TEXTS = (
    *("a", "Two words.", PADDED.format("padded"), "", "  ", "line\nline\n\n\nline", "é 日本語 🙂 e\u0301", "<b>&amp; 'x' \"y\" \\n {{ z }} {% q %}"),
    *('{"a": [1, null]}', "user", "model\n", "-" * 300, "system: no", "[[answer]]", "0", "None", "\u00a0x\u2003"),
    *("a\tb  c\r\nd\x0be\x0cf\x1cg\x85h\u2028i\u2060j\0", "See https://example.org/a?b=c&d", "Many words of a long text. " * 800, "-" * 50_000),
)  # fmt: skip
QUESTIONS = (1, 2, 3, 4, 5, 9, 40)
MOST_MESSAGES, MOST_CHARACTERS = 600, 1_000_000

Message = dict[str, str]
Render = Callable[[Sequence[Message]], str]


def chat_turns(template: str, special: dict[str, str], markup: Collection[str] = ()) -> ChatSpec | None:
    """special: name -> text of the tokens that a template may write. markup: what no decoded answer holds. None where
    pieces do not make up the template."""
    if "strftime_now" in template:
        return None

    def render(messages: Sequence[Message]) -> str:
        rendered, _ = render_jinja_template(
            conversations=[list(messages)], chat_template=template, add_generation_prompt=True, **special
        )
        return rendered[0]

    try:
        spec = _with_rules(render, _pieces(render))
        if spec is None:
            return None
        chats = _conversations(*_named(template), markup, spec.system_start is not None)
        return spec if all(join_turns(spec, chat) == render(chat) for chat in chats) else None
    except Exception:  # a template is a program, it may raise anything
        return None


def join_turns(spec: ChatSpec, messages: Sequence[Message]) -> str:
    """What the template gives for a conversation that the model is to answer: maybe a system text, then questions and
    answers in turns, a question last. Answers without the model's own markup."""
    parts, before = [], spec.start
    for message in messages:
        role, text = message["role"], message["content"]
        before = spec.system_start if role == "system" else before
        parts += [before, text.strip() if role in spec.stripped else text]
        before = {"system": spec.system_end, "user": spec.user_end, "assistant": spec.answer_end}[role]
    assert role == "user"
    return "".join([*parts, spec.prompt])


def _pieces(render: Render) -> ChatSpec:
    """ValueError if a marker is not where it should be."""
    system, question, answer, again = MARKERS
    turns = [_message("user", question), _message("assistant", answer), _message("user", again)]
    start, user_end, answer_end, prompt = _between(render(turns), MARKERS[1:])
    system_start = system_end = None
    try:
        system_start, system_end, *_ = _between(render([_message("system", system), *turns]), MARKERS)
    except Exception:  # many templates take none, and each refuses it in its own way
        system_start = system_end = None
    return ChatSpec(start, system_start, system_end, user_end, answer_end, prompt, ())


def _between(text: str, markers: Sequence[str]) -> list[str]:
    pieces = []
    for marker in markers:
        before, found, text = text.partition(marker)
        if not found or marker in text:
            raise ValueError(f"{marker} is not in its place")
        pieces.append(before)
    return [*pieces, text]


def _with_rules(render: Render, spec: ChatSpec) -> ChatSpec | None:
    """With the roles whose texts lose the white space around them."""
    roles = ROLES if spec.system_start is not None else ROLES[1:]
    chat = [_message(role, PADDED.format(role)) for role in roles] + [_message("user", PADDED.format("last"))]
    for flags in itertools.product((True, False), repeat=len(roles)):
        stripped = tuple(role for role, flag in zip(roles, flags, strict=True) if flag)
        trial = dataclasses.replace(spec, stripped=stripped)
        if join_turns(trial, chat) == render(chat):
            return trial
    return None


def _named(template: str) -> tuple[list[str], list[int]]:
    """Texts and whole numbers in the template's code."""
    tokens = list(Environment().lexer.tokenize(template))
    strings, integers = ({token.value for token in tokens if token.type == kind} for kind in ("string", "integer"))
    return sorted(strings), sorted(integers)


def _conversations(
    named: Sequence[str], numbers: Sequence[int], markup: Collection[str], has_system: bool
) -> Iterator[list[Message]]:
    """With and without a system text where there may be one: every text in the place of every role, and long ones."""
    counted = ["x" * (number + 1) for number in numbers if number <= MOST_CHARACTERS]
    texts = [*TEXTS, *named, *(f"{text}a{text}b{text}" for text in named), *counted]
    answers = [text for text in texts if not any(mark in text for mark in markup)]
    said = {"system": texts, "user": texts, "assistant": answers}
    small = [number for number in numbers if number <= MOST_MESSAGES]
    lengths = {*QUESTIONS, *(questions for n in small for questions in (n // 2 + 1, n // 2 + 2, n + 1))}
    for system, questions in itertools.product(([], ["system"]) if has_system else ([],), sorted(lengths)):
        roles = [*system, "user", *["assistant", "user"] * (questions - 1)]
        yield [_message(role, "a") for role in roles]
        for shift in range(len(texts) if questions <= 4 else 0):
            yield [_message(role, said[role][place % len(said[role])]) for place, role in enumerate(roles, shift)]


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}
