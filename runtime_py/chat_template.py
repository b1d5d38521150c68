"""A checkpoint's chat template, rendered with what Transformers' apply_chat_template gives it: the same environment,
variables and treatment of messages (transformers/utils/chat_template_utils.py, tokenization_utils_base.py)."""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox

OWN_ARGUMENTS = ("messages", "tools", "add_generation_prompt")
MAX_DEPTH = 100  # of objects and arrays in each other
REASONING = ("reasoning_content", "thinking", "reasoning")  # a message's thought under any of these is found by all


class ChatTemplate:
    """special: name -> text of the tokens that a template may write, such as bos_token."""

    def __init__(self, path: Path, special: Mapping[str, str]):
        self._path = path
        self._special = dict(special)

    def render(
        self,
        messages: Sequence[Mapping],
        tools: Sequence[Mapping] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """messages: {"role", "content", "tool_calls", ...} each; arguments of tool calls are objects, as Transformers
        takes them. tools: JSON schemas of functions. variables: what else the template reads (documents,
        enable_thinking, ...); they override special tokens.

        ValueError: values that JSON does not have, or one line with the file and what went wrong in the template.
        """
        given = dict(variables or {})
        if clash := sorted(given.keys() & set(OWN_ARGUMENTS)):
            raise ValueError(f"template variable {clash[0]!r} has its own argument; leave it out of the variables")
        given = {**self._special, "documents": None, **_plain(given, "variables")}
        given |= {
            "messages": _messages(messages),
            "tools": _tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._compiled.render(given)
        except Exception as error:  # a template is a program, it may raise anything
            raise ValueError(f"{self._path}: {_reason(error)}") from None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.globals["dict"] = _Dict()
        environment.globals["namespace"] = _Namespace
        return environment.from_string(self._path.read_text(encoding="utf-8"))


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks what a model wrote, for training: here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012  jinja2 reads it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Dict:
    """dict without the methods of the type, some of which change their arguments."""

    def __call__(self, *args: object, **entries: object) -> dict:
        return dict(*args, **entries)

    def fromkeys(self, keys: Sequence, value: object = None) -> dict:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """namespace() that takes no names of Python's internals."""

    def __init__(*args, **entries):  # without names of its own: namespace(self=1) is allowed
        jinja2.utils.Namespace.__init__(*args, **entries)
        for name in dict(*args[1:], **entries):
            _check_name(name)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace holds no name with an underscore in front, got {name!r}")


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """json.dumps: jinja's own filter escapes HTML characters"""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _reason(error: Exception) -> str:
    """One line: the place in the file where it is known, and the message, or the kind of an error without one."""
    message = " ".join(str(error).split()) or type(error).__name__
    line = getattr(error, "lineno", None)  # of a syntax error
    return f"line {line}: {message}" if line else message


def _messages(messages: Sequence[Mapping]) -> list[dict]:
    if not messages:
        raise ValueError("the conversation is empty; give at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping, where: str) -> dict:
    """Keys without a value are left out; a thought is found under each name that templates use."""
    plain = {key: value for key, value in _object(message, where).items() if value is not None}
    thought = next((plain[key] for key in REASONING if key in plain), None)
    return plain if thought is None else {"thinking": thought, **plain, "reasoning_content": thought}


def _tools(tools: Sequence[Mapping] | None) -> list[dict] | None:
    return None if tools is None else [_object(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _object(value: Mapping, where: str) -> dict:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected an object, got {type(value).__name__}")
    return _plain(value, where)


def _plain(value: object, where: str, depth: int = 0) -> object:
    """A copy of JSON values alone, so that a template reaches neither the caller's objects nor their methods."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{where.split('.')[0][:40]}: objects and arrays are nested deeper than {MAX_DEPTH}")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise ValueError(f"{where}: {type(value).__name__} is no JSON value")
