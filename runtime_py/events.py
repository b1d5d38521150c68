"""What a model writes, as events: text, thoughts and tool calls, from bursts of token ids.

The markup is Gemma 4's, as its chat template writes it: <|channel>thought\\n ... <channel|> around a thought,
<|tool_call>call:name{...}<tool_call|> around a call. Special tokens are known by id: their text spelled out in ordinary
tokens is text. A vocabulary without these tokens has no markup, and everything is text. Each id is looked at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from .text import Text, TextStream
from .tool_calls import parse_call

CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"
CALL, CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
THOUGHT = "thought\n"  # the label of a channel


@dataclass(frozen=True)
class TextDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class ThoughtDelta:
    """More of what stands in a channel."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """arguments: JSON values."""

    name: str
    arguments: dict[str, object]


@dataclass(frozen=True)
class MalformedToolCall:
    """text: as the model wrote it, with its special tokens; reason: what is wrong with it."""

    text: str
    reason: str


@dataclass(frozen=True)
class End:
    """unclosed: "thought" or "tool_call" if the ids end inside one."""

    unclosed: str | None


Event = TextDelta | ThoughtDelta | ToolCall | MalformedToolCall | End


class _Place(Enum):
    TEXT = "text"
    LABEL = "label"  # in a channel, before it is known whether it begins with THOUGHT
    THOUGHT = "thought"


class EventParser:
    """Ids in, events out. A channel lasts until its end or the next channel; a call within one is a call.

    Inside a string of a call every token but the quote is part of the string.
    """

    def __init__(self, text: Text):
        self._text = text
        self._markup = _markup(text)
        self._stream = TextStream(text)
        self._place = _Place.TEXT
        self._label = ""
        self._call: list[int] | None = None  # the ids of an open call from <|tool_call> on
        self._in_string = False

    def push(self, ids: Iterable[int]) -> list[Event]:
        """The events that these ids complete, maybe none."""
        events: list[Event] = []
        plain: list[int] = []
        for token in ids:
            if self._call is not None:
                events += self._continue_call(token)
            elif token in self._markup:
                events += self._deltas(self._stream.push(plain) + self._stream.flush())
                plain = []
                events += self._turn(token)
            elif token not in self._text.tokens.eos:
                plain.append(token)
        return events + self._deltas(self._stream.push(plain))

    def finish(self) -> list[Event]:
        """What was held back, as it stands, and the end. The parser takes no ids after it."""
        events = self._deltas(self._stream.flush()) + self._settle_label()
        unclosed = "thought" if self._place is not _Place.TEXT else None
        if self._call is not None:
            if self._call[-1] in self._text.tokens.eos:  # what stopped generation is no part of it
                self._call.pop()
            events.append(self._malformed("it is not closed"))
            unclosed = "tool_call"
        return [*events, End(unclosed)]

    def _turn(self, token: int) -> list[Event]:
        """A token of the markup outside of a call."""
        events = self._settle_label()
        content = self._markup[token]
        if content == CALL:
            self._call, self._in_string = [token], False
        elif content == CHANNEL:
            self._place = _Place.LABEL
        elif content == CHANNEL_END:
            self._place = _Place.TEXT
        return events

    def _continue_call(self, token: int) -> list[Event]:
        content = self._markup.get(token)
        if content == CALL_END and not self._in_string:
            self._call.append(token)
            return [self._finished_call()]
        if content == CALL and not self._in_string:
            broken = self._malformed("it is not closed")
            self._call = [token]
            return [broken]
        self._call.append(token)
        self._in_string ^= content == QUOTE
        return []

    def _finished_call(self) -> Event:
        segments: list[list[int]] = [[]]
        for token in self._call[1:-1]:
            if self._markup.get(token) == QUOTE:
                segments.append([])
            else:
                segments[-1].append(token)
        try:
            if any(self._text.is_skipped(token) for ids in segments[::2] for token in ids):
                raise ValueError("a special token stands outside of a string")
            call = ToolCall(*parse_call([self._text.decode_all(ids) for ids in segments]))
        except ValueError as error:
            return self._malformed(str(error))
        self._call = None
        return call

    def _malformed(self, reason: str) -> MalformedToolCall:
        ids, self._call, self._in_string = self._call, None, False
        return MalformedToolCall(self._text.decode_all(ids), reason)

    def _deltas(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._place is _Place.TEXT:
            return [TextDelta(text)]
        if self._place is _Place.THOUGHT:
            return [ThoughtDelta(text)]
        self._label += text
        if THOUGHT.startswith(self._label) and self._label != THOUGHT:
            return []
        return self._settle_label()

    def _settle_label(self) -> list[Event]:
        """A channel's beginning is complete: "thought\\n" is its label, anything else already its content."""
        if self._place is not _Place.LABEL:
            return []
        thought = "" if self._label == THOUGHT.strip() else self._label.removeprefix(THOUGHT)
        self._place, self._label = _Place.THOUGHT, ""
        return [ThoughtDelta(thought)] if thought else []


def _markup(text: Text) -> dict[int, str]:
    """id -> content of the tokens that structure an answer; those of channels or of calls only if all of them exist."""
    found = {}
    for contents in ((CHANNEL, CHANNEL_END), (CALL, CALL_END, QUOTE)):
        ids = [text.special_id(content) for content in contents]
        if None not in ids:
            found |= dict(zip(ids, contents, strict=True))
    return found


def assistant_message(events: Sequence[Event], first_call: int = 0) -> dict[str, object]:
    """A finished answer as the message to append to a conversation, in OpenAI's form but for the arguments, which are
    objects as chat templates take them. Thoughts are left out, and malformed calls, whose tokens would open calls
    that nothing closes. first_call: how many calls the conversation has already, so that their ids differ.
    """
    message = {"role": "assistant", "content": "".join(event.text for event in events if isinstance(event, TextDelta))}
    calls = [event for event in events if isinstance(event, ToolCall)]
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{first_call + i}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(calls)
        ]
    return message
