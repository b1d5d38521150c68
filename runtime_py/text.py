"""Text at the edge of the runtime: prompts and chats to token ids, streamed ids to text."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from .chat_template import ChatTemplate
from .files import check_sizes
from .manifest import Manifest, TokensSpec

TEMPLATE = "chat_template.jinja"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Text:
    """A bundle's tokenizer and chat template."""

    def __init__(self, bundle: Path, manifest: Manifest):
        self.tokens: TokensSpec = manifest.tokens
        has_template = TEMPLATE in manifest.files
        self._template = ChatTemplate(bundle / TEMPLATE, self.tokens.special) if has_template else None
        check_sizes(bundle, manifest, ["tokenizer.json", *([TEMPLATE] if has_template else [])])
        self.tokenizer = _load_tokenizer(bundle / "tokenizer.json", self.tokens)
        if (size := self.tokenizer.get_vocab_size()) > manifest.target.vocab_size:
            raise ValueError(f"{bundle / 'tokenizer.json'}: {size} tokens, the model has {manifest.target.vocab_size}")
        added = self.tokenizer.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.special}

    def special_id(self, content: str) -> int | None:
        """The id of a special token, None if the tokenizer has no such token."""
        token = self.tokenizer.token_to_id(content)
        return token if token in self._special else None

    def encode_prompt(self, prompt: str) -> list[int]:
        """Ids of a raw prompt with exactly one bos, whether the text begins with one or not."""
        if not prompt:
            raise ValueError("the prompt is empty; give at least one character")
        ids = self._encode(prompt)
        return ids if ids[:1] == [self.tokens.bos] else [self.tokens.bos, *ids]

    def encode_chat(
        self,
        messages: Sequence[Mapping],
        tools: Sequence[Mapping] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Ids of a conversation, by default one that the model is to answer; the template emits bos."""
        return self._encode(self.render_chat(messages, tools, add_generation_prompt, variables))

    def render_chat(
        self,
        messages: Sequence[Mapping],
        tools: Sequence[Mapping] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """As ChatTemplate.render. ValueError also if the bundle has no template."""
        if self._template is None:
            raise ValueError("the checkpoint has no chat template; use a raw prompt")
        return self._template.render(messages, tools, add_generation_prompt, variables)

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode("utf-8")  # tokenizers raises a TypeError without a reason
        except UnicodeEncodeError as error:
            raise ValueError(f"character {error.start} of the text is no Unicode character; give UTF-8 text") from None
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def decode_all(self, ids: list[int]) -> str:
        """With the text of special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def is_skipped(self, token: int) -> bool:
        """Whether decoding passes over it: a special token or an id without one."""
        return token in self._special or self.tokenizer.id_to_token(token) is None

    def is_byte(self, token: int) -> bool:
        """Whether it stands for one byte of UTF-8. Consecutive ones are decoded together, across skipped tokens."""
        return _BYTE_TOKEN.fullmatch(self.tokenizer.id_to_token(token)) is not None


class TextStream:
    """Ids in, final text out: the pieces make up exactly what the ids decode to.

    A run of byte tokens is held back until it ends, for one invalid byte makes replacement characters of the whole run:
    no character of it is certain before. So a UTF-8 sequence split over tokens comes whole.
    """

    def __init__(self, text: Text):
        self._text = text
        self._held: list[int] = []  # a run of byte tokens

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete, maybe none."""
        done: list[int] = []
        for token in ids:
            if self._text.is_skipped(token):
                continue
            self._held.append(token)
            if not self._text.is_byte(token):
                done += self._held
                self._held = []
        return self._text.decode(done)

    def flush(self) -> str:
        """What is held back, as it decodes; an incomplete sequence gives replacement characters."""
        done, self._held = self._held, []
        return self._text.decode(done)


def _load_tokenizer(path: Path, tokens: TokensSpec) -> Tokenizer:
    """Without what a tokenizer saved while training may carry: truncation and padding. As in Transformers, the tokens
    that have a name are special, whatever the file says."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        known = [token for token in tokens.special.values() if tokenizer.token_to_id(token) is not None]
        tokenizer.add_special_tokens(known)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"{path}: {error}") from None
    return tokenizer
