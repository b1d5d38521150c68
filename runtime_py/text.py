"""Text at the edge of the runtime: prompts and chats to token ids, streamed ids to text."""

import datetime
import json
from pathlib import Path

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .manifest import Manifest, TokensSpec, check_sizes

TEMPLATE = "chat_template.jinja"


class Text:
    """A bundle's tokenizer and chat template."""

    def __init__(self, bundle: Path, manifest: Manifest):
        check_sizes(bundle, manifest, ["tokenizer.json"])
        self.tokens: TokensSpec = manifest.tokens
        self._template = bundle / TEMPLATE if TEMPLATE in manifest.files else None
        try:
            self.tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exceptions
            raise ValueError(f"{bundle / 'tokenizer.json'}: {error}") from None
        if (size := self.tokenizer.get_vocab_size()) > manifest.target.vocab_size:
            raise ValueError(f"{bundle / 'tokenizer.json'}: {size} tokens, the model has {manifest.target.vocab_size}")

    def encode_prompt(self, prompt: str) -> list[int]:
        """Ids of a raw prompt with exactly one bos, whether the text begins with one or not."""
        if not prompt:
            raise ValueError("the prompt is empty")
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        return ids if ids[:1] == [self.tokens.bos] else [self.tokens.bos, *ids]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation that the model is to answer; the template emits bos."""
        return self.tokenizer.encode(self.render_chat(messages), add_special_tokens=False).ids

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
        except jinja2.TemplateError as error:
            raise ValueError(f"{self._template}: {error}") from None

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


_SPECIAL_TOKENS = {"bos_token": "bos", "pad_token": "pad"}


class TextStream:
    """Ids in, whole characters out: a UTF-8 sequence split over tokens is held back until it is complete."""

    def __init__(self, text: Text):
        self._text, self._stream = text, DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._shown = ""

    def push(self, ids: tuple[int, ...]) -> str:
        """The text that these ids complete, maybe none."""
        parts = [self._stream.step(self._text.tokenizer, token) or "" for token in ids]
        self._ids += ids
        self._shown += "".join(parts)
        return "".join(parts)

    def flush(self) -> str:
        """What a last incomplete sequence decodes to."""
        return self._text.decode(self._ids)[len(self._shown) :]


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """json.dumps: jinja's own filter escapes HTML characters"""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
