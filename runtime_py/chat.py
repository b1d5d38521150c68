"""python -m runtime_py chat: a conversation in the terminal, or from piped lines."""

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .costs import MAX_DRAFT_TOKENS
from .drafting import DraftPolicy
from .events import Event, MalformedToolCall, TextDelta, ThoughtDelta, ToolCall
from .loading import choose_policy
from .measure import draft_statistics, peak_rss_mib
from .session import Reply, Session, Settings
from .speculative import ContextFull

HELP = "/reset, /stats, /draft K|auto|off, /save FILE, /quit"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass
class Chat:
    """messages: the history that the template renders, without thoughts. new_settings: for each reply, so that each has
    a seed of its own where none was given."""

    session: Session
    new_settings: Callable[[], Settings]
    system: str | None = None
    think: bool = False
    drafter: str = "auto"
    messages: list[dict] = field(default_factory=list)
    last: Reply | None = None

    def answer(self, line: str) -> None:
        """Print the reply to a message as it comes; a ValueError leaves the history as it was."""
        asked = [*self.messages, {"role": "user", "content": line}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        variables = {"enable_thinking": True} if self.think else None
        show = _Display(sys.stdout.isatty())
        try:
            with _interrupt(self.session.cancel):
                for item in self.session.stream_chat([*system, *asked], self.new_settings(), variables=variables):
                    show(item)
        except ContextFull as error:
            raise ValueError(f"{error}, or begin anew with /reset" if self.messages else str(error)) from None
        self.last = item
        calls = sum(len(message.get("tool_calls", ())) for message in self.messages)
        self.messages = [*asked, item.message(calls)]
        if item.stop_reason != "stop":
            note = {"context": "the context is full; /reset begins anew"}.get(item.stop_reason, item.stop_reason)
            print(f"[{note}]", file=sys.stderr)

    def command(self, line: str) -> bool:
        """Whether the conversation goes on. ValueError: no such command, or one that cannot be."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name in ("/reset", "/stats", "/quit") and argument:
            raise ValueError(f"{name} takes nothing after it")
        if name == "/quit":
            return False
        if name == "/reset":
            self.session.rewind(0)
            self.messages, self.last = [], None
            print("[a new conversation]", file=sys.stderr)
        elif name == "/stats":
            print(_statistics(self.session, self.last), file=sys.stderr)
        elif name == "/draft":
            self._draft(argument)
        elif name == "/save":
            if not argument:
                raise ValueError("/save needs the name of a file")
            self.session.save(Path(argument))
            print(f"[saved to {argument}]", file=sys.stderr)
        else:
            raise ValueError(f"{name} is no command; there are {HELP}")
        return True

    def _draft(self, argument: str) -> None:
        pair = self.session.pair
        count = {"auto": None, "off": 0}.get(argument, argument)
        if isinstance(count, str):
            if not re.fullmatch("[0-9]{1,4}", count) or not 0 <= int(count) <= MAX_DRAFT_TOKENS:
                raise ValueError(f"/draft {argument}: give 0 to {MAX_DRAFT_TOKENS}, auto or off")
            count = int(count)
        if count != 0 and pair.off_reason:
            raise ValueError(f"drafting is off: {pair.off_reason}")
        schedule = None if count is None else "constant"
        self.session.policy = choose_policy(pair.manifest.drafter, count, schedule, self.drafter)
        print(f"[draft tokens {'auto' if count is None else count}]", file=sys.stderr)


class _Display:
    """Prints a reply; a thought dimmed, or after a label where the output is no terminal."""

    def __init__(self, terminal: bool):
        self._thought = (DIM, PLAIN + "\n") if terminal else ("(thought) ", "\n")
        self._thinking = False

    def __call__(self, item: Event | Reply) -> None:
        if isinstance(item, ThoughtDelta) != self._thinking:
            print(self._thought[self._thinking], end="")
            self._thinking = not self._thinking
        if isinstance(item, TextDelta | ThoughtDelta):
            print(item.text, end="", flush=True)
        elif isinstance(item, ToolCall):
            print(f"\n[tool call] {item.name}({json.dumps(item.arguments, ensure_ascii=False)})", flush=True)
        elif isinstance(item, MalformedToolCall):
            print(f"\n[malformed tool call: {item.reason}] {item.text}", flush=True)
        elif isinstance(item, Reply):
            print(flush=True)


@contextmanager
def _interrupt(cancel: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C ends the reply alone, unless the caller of the program ignores it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(chat: Chat) -> bool:
    """Lines from stdin until /quit or its end. An error is one line, and the conversation goes on -> whether there was one."""
    terminal, failed = sys.stdin.isatty(), False
    if terminal:
        print(f"{chat.session.pair.manifest.name}; {HELP}", file=sys.stderr)
    while True:
        try:
            print("> " if terminal else "", end="", flush=True)
            line = sys.stdin.readline()
            if not line or not _take(chat, line.strip()):
                return failed
        except KeyboardInterrupt:
            print("\n[/quit or Ctrl-D ends the conversation]", file=sys.stderr)
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as error:
            failed = True
            print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)


def _take(chat: Chat, line: str) -> bool:
    """Whether the conversation goes on."""
    if line.startswith("/"):
        return chat.command(line)
    if line:
        chat.answer(line)
    return True


def _statistics(session: Session, last: Reply | None) -> str:
    policy = session.policy
    drafts = policy.num_tokens if isinstance(policy, DraftPolicy) else "auto"
    parts = [f"context {len(session.ids)} of {session.max_context_tokens} tokens", f"draft tokens {drafts}"]
    if last:
        counts = draft_statistics(last.rounds)
        rate = last.decode_tokens_per_second
        parts += [
            f"last reply {len(last.token_ids)} tokens" + (f" at {rate:.1f} tokens/s" if rate else ""),
            f"{counts['accepted']} of {counts['drafted']} drafts accepted",
            f"{last.reused_tokens} of {len(last.prompt_ids)} prompt tokens reused",
            f"{last.rerun_tokens} run again",
        ]
    return f"[{', '.join(parts)}, peak {peak_rss_mib():.0f} MiB]"
