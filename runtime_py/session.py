"""A conversation with a loaded bundle: tokens and their KV rows stay from turn to turn.

    session = load("build/tiny-int8")
    reply = session.generate("ROMEO:", Settings(max_new_tokens=40))
    for event in session.stream_chat([{"role": "user", "content": "Good morrow."}]): ...

Each call is given the whole text, a prompt or all messages. What it has in common with the text of the call before is not
run again. A session is for one thread at a time, but for `cancel`.
"""

import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import loading, session_file
from .cpus import default_threads
from .events import End, Event, EventParser, TextDelta, assistant_message
from .loading import Pair
from .memory import give_back
from .sampling import LogitsHook, Sampling, choose_sampling
from .speculative import Round, check_request, generate, prefill_chunks
from .stops import StopStrings
from .text import Text, TextStream

MARGIN_ROWS = 1024  # how far behind the open chunk a conversation may be rewound without running it again
Prompt = str | Sequence[int]


class SessionBusy(RuntimeError):
    """A second call while one runs, of a session or of the model that sessions share."""


@dataclass(frozen=True)
class Settings:
    """max_new_tokens None: until the context is full. sampling None: the bundle's defaults with a drawn seed. stop: texts
    that end the answer and are left out of it."""

    max_new_tokens: int | None = None
    sampling: Sampling | None = None
    hook: LogitsHook | None = None
    stop: tuple[str, ...] = ()


DEFAULTS = Settings()


@dataclass(frozen=True)
class Reply:
    """events: all that `stream` gave; the text is that of the answer, without thoughts and calls.

    stop_reason: "stop" (a stop token or text), "length", "context" (full) or "cancelled". reused_tokens: of the prompt,
    not run because their rows were held; rerun_tokens: known from the call before, but run again because rows had gone.
    prefill_s: seconds until the first token; decode_s: from the first token to the last.
    """

    events: tuple[Event, ...]
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    stop_reason: str
    reused_tokens: int
    rerun_tokens: int
    sampling: Sampling
    rounds: tuple[Round, ...]
    prefill_s: float
    decode_s: float

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))

    @property
    def decode_tokens_per_second(self) -> float | None:
        return (len(self.token_ids) - 1) / self.decode_s if len(self.token_ids) > 1 else None

    def message(self, first_call: int = 0) -> dict[str, object]:
        """The answer as a message for the history; see events.assistant_message."""
        return assistant_message(self.events, first_call)


def load(
    bundle: str | Path,
    threads: int | None = None,
    draft_tokens: int | None = None,
    schedule: str | None = None,
    backend: str = "auto",
    drafter: str = "auto",
) -> "Session":
    """A session with a bundle; threads None: as cpus.default_threads has it; the rest as in loading.load."""
    return Session(loading.load(Path(bundle), threads or default_threads(), draft_tokens, schedule, backend, drafter))


class Session:
    """ids: the text so far, prompt and replies. policy: who drafts and how many; it may be replaced between calls."""

    def __init__(self, pair: Pair, max_context_tokens: int | None = None, margin_rows: int = MARGIN_ROWS):
        self.pair, self.policy = pair, pair.policy
        self.ids: list[int] = []
        self._cache = pair.target.new_cache(max_context_tokens, margin_rows)
        self._lock, self._cancelled = threading.Lock(), threading.Event()

    @property
    def max_context_tokens(self) -> int:
        return self._cache.max_context_tokens

    def generate(self, prompt: Prompt, settings: Settings = DEFAULTS) -> Reply:
        """Continue a text, or token ids as they are. ValueError if that cannot be; the session is then unchanged."""
        return _last(self.stream(prompt, settings))

    def stream(self, prompt: Prompt, settings: Settings = DEFAULTS) -> Iterator[Event | Reply]:
        """As `generate`, but TextDeltas as they come, an End, then the Reply. A caller may stop at any of them."""
        with self._in_use(), self._model():
            ids = self.pair.text.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
            yield from self._reply(ids, _PlainText(self.pair.text), settings)

    def chat(
        self,
        messages: Sequence[Mapping],
        settings: Settings = DEFAULTS,
        tools: Sequence[Mapping] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> Reply:
        """Answer a conversation; messages, tools and variables as in ChatTemplate.render."""
        return _last(self.stream_chat(messages, settings, tools, variables))

    def stream_chat(
        self,
        messages: Sequence[Mapping],
        settings: Settings = DEFAULTS,
        tools: Sequence[Mapping] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> Iterator[Event | Reply]:
        """As `chat`, but text, thoughts and tool calls as they come, an End, then the Reply."""
        with self._in_use(), self._model():
            ids = self.pair.text.encode_chat(messages, tools, variables=variables)
            yield from self._reply(ids, EventParser(self.pair.text), settings)

    def cancel(self) -> None:
        """From any thread: the call that runs ends after its block, or its chunk of the prompt, with what it has."""
        self._cancelled.set()

    def rewind(self, length: int) -> int:
        """Forget the text from token `length` on -> how many of the tokens that stay will be run again."""
        with self._in_use():
            if not isinstance(length, int | np.integer) or not 0 <= length <= len(self.ids):
                raise ValueError(f"cannot rewind to {length}: the session has {len(self.ids)} tokens")
            return self._rewind(length)

    def save(self, path: str | Path) -> None:
        """Tokens and KV rows to a safetensors file; an existing one is replaced."""
        with self._in_use():
            session_file.write(Path(path), self.pair.manifest, self.pair.backend, self.ids, self._cache)

    def restore(self, path: str | Path) -> None:
        """Become the session that was saved. ValueError, and nothing changed, if another bundle or backend wrote it."""
        with self._in_use():
            self.ids = session_file.read(Path(path), self.pair.manifest, self.pair.backend, self._cache)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with _taken(self._lock, "the session is in use; wait for its call to end, or open another session"):
            self._cancelled.clear()
            yield

    def _model(self) -> AbstractContextManager[None]:
        return _taken(self.pair.lock, "another session runs on this model; wait for its call to end, or load it again")

    def _rewind(self, length: int) -> int:
        known = min(length, self._cache.length)
        held = self._cache.held(known)
        self._cache.rewind(held)
        del self.ids[length:]
        return known - held

    def _reply(self, ids: list[int], parser: "EventParser | _PlainText", settings: Settings) -> Iterator[Event | Reply]:
        sampling = settings.sampling or choose_sampling(self.pair.manifest.sampling)
        budget = self.max_context_tokens if settings.max_new_tokens is None else settings.max_new_tokens
        started = first = time.perf_counter()
        reused, rerun = self._begin(ids, budget)
        rounds: list[Round] = []
        events: list[Event] = []
        stops = StopStrings(settings.stop)
        for entry in self._rounds(budget, sampling, settings.hook):
            first = first if rounds else time.perf_counter()
            rounds.append(entry)
            # token by token where one may end the text, which then ends there however many were drafted
            bursts = [(token,) for token in entry.tokens] if settings.stop else [entry.tokens]
            for count, burst in enumerate(bursts, start=1):
                for event in stops.push(parser.push(burst)):
                    events.append(event)
                    yield event
                if stops.found:
                    if count < len(entry.tokens):
                        self._rewind(len(self.ids) - len(entry.tokens) + count)
                    break
            if stops.found:
                break
        decode_s = time.perf_counter() - first
        for event in stops.push(parser.finish()):
            events.append(event)
            yield event
        yield Reply(
            events=tuple(events),
            prompt_ids=tuple(ids),
            token_ids=tuple(self.ids[len(ids) :]),
            stop_reason="stop" if stops.found else rounds[-1].stop_reason,
            reused_tokens=reused,
            rerun_tokens=rerun,
            sampling=sampling,
            rounds=tuple(rounds),
            prefill_s=first - started,
            decode_s=decode_s,
        )

    def _begin(self, ids: list[int], max_new_tokens: int) -> tuple[int, int]:
        """Take over ids, rewound to what they have in common with the text so far -> tokens reused, tokens run again."""
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        common = next((i for i, pair in enumerate(zip(self.ids, ids, strict=False)) if pair[0] != pair[1]), None)
        known = min(len(self.ids) if common is None else common, self._cache.length, len(ids) - 1)
        held = self._cache.held(known)
        check_request(self.pair.target, self._cache, ids, max_new_tokens, held)
        self._cache.rewind(held)
        self.ids = list(ids)
        return held, known - held

    def _rounds(self, max_new_tokens: int, sampling: Sampling, hook: LogitsHook | None) -> Iterator[Round]:
        pair, long_prompt = self.pair, False
        for _ in prefill_chunks(pair.target, self._cache, self.ids):
            long_prompt = True
            if self._cancelled.is_set():
                yield Round((), 0, 0, "cancelled")
                return
        request = (pair.target, pair.drafter, self._cache, self.ids, max_new_tokens, pair.manifest.tokens, self.policy)
        for entry in generate(*request, sampling, hook):
            if long_prompt:
                give_back()
                long_prompt = False
            if self._cancelled.is_set() and not entry.stop_reason:
                yield dataclasses.replace(entry, stop_reason="cancelled")
                return
            yield entry


class _PlainText:
    """In the place of an EventParser where the text is no chat: markup is text like any other, or skipped."""

    def __init__(self, text: Text):
        self._stream = TextStream(text)

    def push(self, ids: Sequence[int]) -> list[Event]:
        text = self._stream.push(ids)
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Event]:
        text = self._stream.flush()
        return [*([TextDelta(text)] if text else []), End(None)]


@contextmanager
def _taken(lock: threading.Lock, busy: str) -> Iterator[None]:
    if not lock.acquire(blocking=False):
        raise SessionBusy(busy)
    try:
        yield
    finally:
        lock.release()


def _last(items: Iterator[Event | Reply]) -> Reply:
    *_, reply = items
    return reply
