"""OpenAI's requests and answers as plain data: JSON -> what a session is asked, events and replies -> JSON.

What changes a text and is not supported is refused by name, never passed over.
"""

import json
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .events import Event, MalformedToolCall, TextDelta, ThoughtDelta, ToolCall
from .manifest import SamplingSpec
from .sampling import choose_sampling
from .session import Prompt, Reply, Settings

SAMPLING = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "seed": int,
}
NEUTRAL = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"}
COMMON = {"model", "stream", "stream_options", "stop", "max_tokens", "n", *SAMPLING}
CHAT = {"messages", "tools", "tool_choice", "max_completion_tokens", "response_format", "chat_template_kwargs"}
NO_EFFECT = {
    "n": (1,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logprobs": (False,),
    "logit_bias": ({},),
}
NO_EFFECT |= {
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "echo": (False,),
    "best_of": (1,),
}


class ApiError(ValueError):
    """An error as OpenAI writes it; the message is one line."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict:
        kind = (
            "invalid_request_error"
            if self.status < 429
            else "rate_limit_error"
            if self.status == 429
            else "server_error"
        )
        found = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        shown = {key: value and value.encode(errors="backslashreplace").decode() for key, value in found.items()}
        return {"error": shown}  # a client's words in it may be no Unicode


@dataclass(frozen=True)
class Request:
    """messages None: a raw prompt. include_usage: a last chunk of a stream tells it."""

    settings: Settings
    stream: bool
    include_usage: bool
    prompt: Prompt = ""
    messages: Sequence[Mapping] | None = None
    tools: Sequence[Mapping] | None = None
    variables: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Answer:
    """What the parts of one answer have in common."""

    model: str
    chat: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970


def read_request(data: object, chat: bool, model: str, defaults: SamplingSpec) -> Request:
    """ApiError if it is not OpenAI's, or asks for what there is not."""
    if not isinstance(data, dict):
        raise ApiError(400, "the request is no JSON object")
    data = {name: value for name, value in data.items() if value is not None}
    _check_names(data, chat, model)
    settings = Settings(_max_tokens(data), choose_sampling(defaults, **_sampling(data)), None, _stop(data))
    stream = _typed(data, "stream", bool, False), _include_usage(data)
    if not chat:
        return Request(settings, *stream, prompt=_prompt(data))
    tools = None if data.get("tool_choice") == "none" else _tools(data)
    variables = _typed(data, "chat_template_kwargs", dict, None)
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(_typed(data, "messages", list, []))]
    return Request(settings, *stream, messages=messages, tools=tools, variables=variables)


def _check_names(data: dict, chat: bool, model: str) -> None:
    known = COMMON | NEUTRAL | NO_EFFECT.keys() | (CHAT if chat else {"prompt"})
    if unknown := sorted(data.keys() - known):
        raise ApiError(400, f"{unknown[0]} is not supported here", param=unknown[0])
    for name, allowed in NO_EFFECT.items():
        if name in data and not any(type(data[name]) is type(value) and data[name] == value for value in allowed):
            shown = json.dumps(data[name])[:60]
            raise ApiError(400, f"{name} {shown} is not supported; leave it out", param=name)
    if "model" in data and data["model"] != model:
        raise ApiError(404, f"no model {str(data['model'])[:60]!r} here; there is {model}", "model_not_found", "model")


def _typed(data: dict, name: str, kind: type, default: object) -> object:
    value = data.get(name, default)
    number = kind is float and type(value) is int
    if value is not default and not number and type(value) is not kind:
        raise ApiError(400, f"{name} must be of type {kind.__name__}, not {type(value).__name__}", param=name)
    if kind is float and value is not None and not abs(value) <= sys.float_info.max:
        raise ApiError(400, f"{name} is {str(value)[:40]}; it must be finite", param=name)
    return value


def _sampling(data: dict) -> dict[str, float | int | None]:
    return {name: _typed(data, name, kind, None) for name, kind in SAMPLING.items()}


def _max_tokens(data: dict) -> int | None:
    name = "max_completion_tokens" if "max_completion_tokens" in data else "max_tokens"
    count = _typed(data, name, int, None)
    if count is not None and count < 1:
        raise ApiError(400, f"{name} is {count}; it must be at least 1", param=name)
    return count


def _stop(data: dict) -> tuple[str, ...]:
    stop = data.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop) or len(stop) > 4:
        raise ApiError(400, "stop must be a text or up to 4, none empty", param="stop")
    return tuple(stop)


def _include_usage(data: dict) -> bool:
    options = _typed(data, "stream_options", dict, {})
    if unknown := sorted(options.keys() - {"include_usage"}):
        raise ApiError(400, f"stream_options.{unknown[0][:60]} is not supported here", param="stream_options")
    return bool(_typed(options, "include_usage", bool, None))


def _tools(data: dict) -> list[dict] | None:
    tools = _typed(data, "tools", list, None)
    for i, tool in enumerate(tools or []):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"tools[{i}]: expected type function and a function with a name", param="tools")
    return tools


def _prompt(data: dict) -> Prompt:
    prompt = data.get("prompt", "")
    if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
        if len(prompt) > 1:
            raise ApiError(
                400, f"a batch of {len(prompt)} prompts is not supported; send one at a time", param="prompt"
            )
        prompt = prompt[0]
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
        raise ApiError(400, "prompt must be a text or a list of token ids", param="prompt")
    return prompt


def _message(message: object, where: str) -> dict:
    """As chat templates take it: content a text, arguments of calls objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where}: expected an object with a role", param="messages")
    content = "" if message.get("content") is None else message["content"]
    if not isinstance(content, str | list):
        raise ApiError(400, f"{where}: content must be a text or a list of parts", param="messages")
    if isinstance(content, list):
        if not all(map(_is_text, content)):
            raise ApiError(400, f"{where}: only parts of type text are supported", param="messages")
        content = "".join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    calls = message.get("tool_calls")
    found = {**message, "role": role, "content": content}
    return found if calls is None else {**found, "tool_calls": _calls(calls, where)}


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _calls(calls: object, where: str) -> list[dict]:
    try:
        return [{**call, "function": _function(call["function"])} for call in calls]
    except (TypeError, KeyError, ValueError, RecursionError):
        raise ApiError(
            400, f"{where}: tool_calls need a function whose arguments are a JSON object", param="messages"
        ) from None


def _function(function: dict) -> dict:
    if not isinstance(arguments := json.loads(function["arguments"]), dict):
        raise ValueError("no object")
    return {**function, "arguments": arguments}


def _usage(reply: Reply) -> dict:
    prompt, new = len(reply.prompt_ids), len(reply.token_ids)
    cached = {"cached_tokens": reply.reused_tokens}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": cached,
    }


def _finish_reason(reply: Reply) -> str:
    if reply.stop_reason != "stop":
        return "length"
    return "tool_calls" if any(isinstance(event, ToolCall) for event in reply.events) else "stop"


def _call(call: ToolCall) -> dict:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _envelope(answer: Answer, kind: str, choices: list[dict]) -> dict:
    prefix = "chatcmpl" if answer.chat else "cmpl"
    head = {"id": f"{prefix}-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}
    return {**head, "choices": choices}


def whole(answer: Answer, reply: Reply) -> dict:
    """The answer that is not streamed. A call that does not follow the grammar stays as text."""
    end = {"index": 0, "finish_reason": _finish_reason(reply), "logprobs": None}
    texts = [event.text for event in reply.events if isinstance(event, TextDelta | MalformedToolCall)]
    if not answer.chat:
        body = _envelope(answer, "text_completion", [{**end, "text": "".join(texts)}])
    else:
        thought = "".join(event.text for event in reply.events if isinstance(event, ThoughtDelta))
        calls = [_call(event) for event in reply.events if isinstance(event, ToolCall)]
        message = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
        message |= {"reasoning_content": thought} if thought else {}
        message |= {"tool_calls": calls} if calls else {}
        body = _envelope(answer, "chat.completion", [{**end, "message": message}])
    return {**body, "usage": _usage(reply)}


def chunks(answer: Answer, item: Event | Reply, calls: int, include_usage: bool) -> list[dict]:
    """The parts of a stream that an event gives. calls: how many tool calls came before it."""
    if isinstance(item, Reply):
        last = [_chunk(answer, {}, _finish_reason(item))]
        usage = {**_envelope(answer, _chunk_kind(answer), []), "usage": _usage(item)}
        return [*last, usage] if include_usage else last
    if isinstance(item, TextDelta | MalformedToolCall):
        return [_chunk(answer, {"content": item.text})]
    if isinstance(item, ThoughtDelta):
        return [_chunk(answer, {"reasoning_content": item.text})]
    if isinstance(item, ToolCall):
        return [_chunk(answer, {"tool_calls": [{"index": calls, **_call(item)}]})]
    return []


def first_chunk(answer: Answer) -> list[dict]:
    return [_chunk(answer, {"role": "assistant", "content": ""})] if answer.chat else []


def _chunk_kind(answer: Answer) -> str:
    return "chat.completion.chunk" if answer.chat else "text_completion"


def _chunk(answer: Answer, delta: dict, finish_reason: str | None = None) -> dict:
    part = {"delta": delta} if answer.chat else {"text": delta.get("content", "")}
    choice = {"index": 0, **part, "finish_reason": finish_reason, "logprobs": None}
    return _envelope(answer, _chunk_kind(answer), [choice])
