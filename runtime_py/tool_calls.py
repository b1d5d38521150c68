"""The body of a tool call as Gemma's chat template writes it: call:name{key:value,...}

    value   <|"|>any text<|"|>, true, false, None, a number, {key:value,...}, [value,...]
    key     bare as the template writes it, or between <|"|>

Strings are delimited by a token, so what they hold needs no escape. A model may put spaces around what is not a string,
write null, and nothing else: what does not follow the grammar is refused instead of guessed.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_DEPTH = 100  # of objects and arrays in each other
_HEAD = re.compile(r"\s*call:([^{}\[\],]*)(?=\{)")
_LEXEME = re.compile(r"[{}\[\],:]|[^{}\[\],:]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,999})(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORDS = {"true": True, "false": False, "None": None, "null": None}


@dataclass(frozen=True)
class Quoted:
    """A string and its end; lexemes that are plain str are what stands between strings."""

    text: str


def parse_call(segments: Sequence[str]) -> tuple[str, dict]:
    """The texts between the quote tokens of a call's body, of which every second is a string -> name, arguments.
    ValueError says what does not follow the grammar."""
    if len(segments) % 2 == 0:
        raise ValueError("a string is not closed")
    head = _HEAD.match(segments[0])
    if not head or not (name := head[1].strip()):
        raise ValueError("it does not begin with call:name{")
    reader = _Reader(_lexemes([segments[0][head.end() :], *segments[1:]]))
    arguments = reader.value(0)
    if (rest := reader.next()) is not None:
        raise ValueError(f"{_shown(rest)} follows the arguments")
    return name, arguments


def _lexemes(segments: Sequence[str]) -> list[str | Quoted]:
    lexemes: list[str | Quoted] = []
    for i, segment in enumerate(segments):
        if i % 2:
            lexemes.append(Quoted(segment))
        else:
            parts = [part.strip() for part in _LEXEME.findall(segment)]
            lexemes += [part for part in parts if part]
    return lexemes


class _Reader:
    def __init__(self, lexemes: list[str | Quoted]):
        self._lexemes = lexemes
        self._at = 0

    def next(self) -> str | Quoted | None:
        """The next lexeme, None at the end."""
        lexeme = self._lexemes[self._at] if self._at < len(self._lexemes) else None
        self._at += 1
        return lexeme

    def value(self, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise ValueError(f"objects and arrays are nested deeper than {MAX_DEPTH}")
        lexeme = self.next()
        if isinstance(lexeme, Quoted):
            return lexeme.text
        if lexeme == "{":
            return self._object(depth)
        if lexeme == "[":
            return self._array(depth)
        if lexeme in _WORDS:
            return _WORDS[lexeme]
        return _number(lexeme)

    def _object(self, depth: int) -> dict:
        entries: dict[str, object] = {}
        while not self._closes("}", first=not entries):
            key = self.next()
            if isinstance(key, Quoted):
                key, colon = key.text, self.next()
            elif key == ":":
                key, colon = "", key
            else:
                colon = self.next()
            if key is None or key in tuple("{}[],") or colon != ":":
                raise ValueError(f"{_shown(key)} is no key with a colon")
            if key in entries:
                raise ValueError(f"key {key!r} is given twice")
            entries[key] = self.value(depth + 1)
        return entries

    def _array(self, depth: int) -> list:
        items: list[object] = []
        while not self._closes("]", first=not items):
            items.append(self.value(depth + 1))
        return items

    def _closes(self, end: str, first: bool) -> bool:
        """Whether the object or array ends here; if not, what stands in front of its next entry is read over."""
        lexeme = self.next()
        if lexeme == end:
            return True
        if first:
            self._at -= 1
        elif lexeme != ",":
            raise ValueError(f"{_shown(lexeme)} where ',' or {end!r} is expected")
        return False


def _number(lexeme: str | None) -> int | float:
    """As JSON has them."""
    match = _NUMBER.fullmatch(lexeme or "")
    if not match:
        raise ValueError(f"{_shown(lexeme)} where a value is expected")
    number = json.loads(lexeme)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{_shown(lexeme)} is too large a number")
    return number


def _shown(lexeme: str | Quoted | None) -> str:
    if lexeme is None:
        return "the end"
    return repr((lexeme.text if isinstance(lexeme, Quoted) else lexeme)[:40])
