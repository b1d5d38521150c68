"""Text at the edge of the runtime: prompts and chats to token ids, streamed ids to text."""

import datetime
import json
import re
from pathlib import Path

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from .manifest import Manifest, TokensSpec, check_sizes

TEMPLATE = "chat_template.jinja"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Text:
    """A bundle's tokenizer and chat template."""

    def __init__(self, bundle: Path, manifest: Manifest):
        self.tokens: TokensSpec = manifest.tokens
        self._template = bundle / TEMPLATE if TEMPLATE in manifest.files else None
        check_sizes(bundle, manifest, ["tokenizer.json", *([TEMPLATE] if self._template else [])])
        try:
            self.tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
            self.tokenizer.no_truncation()  # a tokenizer saved while training may carry both
            self.tokenizer.no_padding()
        except Exception as error:  # tokenizers raises bare Exceptions
            raise ValueError(f"{bundle / 'tokenizer.json'}: {error}") from None
        if (size := self.tokenizer.get_vocab_size()) > manifest.target.vocab_size:
            raise ValueError(f"{bundle / 'tokenizer.json'}: {size} tokens, the model has {manifest.target.vocab_size}")
        added = self.tokenizer.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.special}

    def encode_prompt(self, prompt: str) -> list[int]:
        """Ids of a raw prompt with exactly one bos, whether the text begins with one or not."""
        if not prompt:
            raise ValueError("the prompt is empty; give at least one character")
        ids = self._encode(prompt)
        return ids if ids[:1] == [self.tokens.bos] else [self.tokens.bos, *ids]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation that the model is to answer; the template emits bos."""
        return self._encode(self.render_chat(messages))

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        """messages: {"role", "content"} each. The environment is that of Transformers' apply_chat_template."""
        if self._template is None:
            raise ValueError("the checkpoint has no chat template; use a raw prompt")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        special = {
            name: self.tokenizer.id_to_token(getattr(self.tokens, token)) for name, token in _SPECIAL_TOKENS.items()
        }
        try:
            template = environment.from_string(self._template.read_text(encoding="utf-8"))
            return template.render(messages=messages, add_generation_prompt=True, **special)
        except Exception as error:  # a template is a program, it may raise anything
            raise ValueError(f"{self._template}: {' '.join(str(error).split())}") from None

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode("utf-8")  # tokenizers raises a TypeError without a reason
        except UnicodeEncodeError as error:
            raise ValueError(f"character {error.start} of the text is no Unicode character; give UTF-8 text") from None
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def is_final(self, token: int) -> bool:
        """Whether ids after this one leave the text up to it as it is. Consecutive byte tokens are decoded together, across
        tokens that decoding skips."""
        piece = self.tokenizer.id_to_token(token)
        return piece is not None and token not in self._special and not _BYTE_TOKEN.fullmatch(piece)


_SPECIAL_TOKENS = {"bos_token": "bos", "pad_token": "pad"}


class TextStream:
    """Ids in, final text out: a run of byte tokens is held back until it ends, so that a UTF-8 sequence split over tokens
    comes whole and the pieces make up exactly what the ids decode to."""

    def __init__(self, text: Text):
        self._text = text
        self._held: list[int] = []

    def push(self, ids: tuple[int, ...]) -> str:
        """The text that these ids complete, maybe none."""
        self._held += ids
        final = max((i + 1 for i, token in enumerate(self._held) if self._text.is_final(token)), default=0)
        done, self._held = self._held[:final], self._held[final:]
        return self._text.decode(done)

    def flush(self) -> str:
        """What is held back, as it decodes; an incomplete sequence gives replacement characters."""
        done, self._held = self._held, []
        return self._text.decode(done)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """json.dumps: jinja's own filter escapes HTML characters"""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
