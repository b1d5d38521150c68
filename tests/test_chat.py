"""The chat of the command line: piped lines in, replies out, commands, an interrupt, and what goes to the history."""

import io
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime_py.chat import DIM, PLAIN, Chat, run
from runtime_py.events import End, MalformedToolCall, TextDelta, ThoughtDelta, ToolCall
from runtime_py.sampling import GREEDY
from runtime_py.session import Reply, Session, Settings

from .command_line import ROOT, command, environment, error_of, remove
from .conftest import BACKENDS
from .reference import load_tiny

LIMITS = ("--max-new-tokens", 60, "--temperature", 0, "--threads", 1)
FIRST, SECOND = "Good morrow.", "How are you?"


@pytest.fixture(scope="module", params=BACKENDS)
def bundle(request, bundle_of):
    return bundle_of("tiny", backend=request.param)


def chat(bundle, text: str, *options: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        command("chat", bundle, *LIMITS, *options),
        cwd=ROOT,
        env=environment(),
        input=text,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )


def api_replies(bundle, *turns: str, system: str | None = None) -> list[str]:
    session = Session(load_tiny(bundle, draft_tokens=0))
    messages, texts = [{"role": "system", "content": system}] if system else [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        reply = session.chat(messages, Settings(60, GREEDY))
        messages.append(reply.message())
        texts.append(reply.text)
    return texts


def test_piped_conversation_is_that_of_the_api(bundle):
    result = chat(bundle, f"{FIRST}\n\n{SECOND}\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "".join(f"{text}\n" for text in api_replies(bundle, FIRST, SECOND))
    system = chat(bundle, f"{FIRST}\n", "--system", "Speak of love.")
    assert system.stdout == "".join(f"{text}\n" for text in api_replies(bundle, FIRST, system="Speak of love."))


def test_commands(bundle, tmp_path):
    path = tmp_path / "kept.safetensors"
    lines = [
        FIRST,
        "/stats",
        "/draft off",
        "/stats",
        "/draft 4",
        "/reset",
        "/stats",
        FIRST,
        f"/save {path}",
        "/quit",
        "x",
    ]
    result = chat(bundle, "\n".join(lines))
    first = api_replies(bundle, FIRST)[0]
    assert (result.returncode, result.stdout) == (0, f"{first}\n{first}\n")
    told = [line for line in result.stderr.splitlines() if line.startswith("[") and not line.startswith("[context")]
    assert told == ["[draft tokens 0]", "[draft tokens 4]", "[a new conversation]", f"[saved to {path}]"]
    stats = [line for line in result.stderr.splitlines() if line.startswith("[context")]
    assert "draft tokens auto, last reply" in stats[0] and "drafts accepted" in stats[0]
    assert "draft tokens 0, last reply" in stats[1]
    assert stats[2].startswith("[context 0 of 2048 tokens, draft tokens 4, peak ")
    session = Session(load_tiny(bundle, draft_tokens=0))
    session.restore(path)
    assert session.pair.text.decode(session.ids).endswith(first)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/draft 17", "/draft 17: give 0 to 16, auto or off"),
        ("/draft", "/draft : give 0 to 16, auto or off"),
        ("/save", "/save needs the name of a file"),
        ("/save /no/where", "/no/where: cannot be written ("),
        ("/reset now", "/reset takes nothing after it"),
        ("/what", "/what is no command; there are /reset, /stats, /draft K|auto|off, /save FILE, /quit"),
        ("word " * 3000, "tokens, the context holds 2048; shorten the prompt"),
    ],
)
def test_error_is_one_line_and_the_conversation_goes_on(bundle, line, message):
    result = chat(bundle, f"{line}\n{FIRST}\n")
    assert (result.returncode, result.stdout) == (2, f"{api_replies(bundle, FIRST)[0]}\n")
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0] and "Traceback" not in result.stderr


def test_a_full_context_is_told_with_the_way_out(bundle):
    result = chat(bundle, f"{FIRST}\n{FIRST}\n/reset\n{FIRST}\n", "--context", 60, "--max-new-tokens", 40)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].endswith(
        "the context holds 60; shorten the prompt, or begin anew with /reset"
    )
    half = len(result.stdout) // 2
    assert result.stdout[:half] == result.stdout[half:] != "", "the first and the third are answered alike"


def test_bad_options_are_one_line(bundle, tmp_path):
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    assert "max_new_tokens is 0" in error_of("chat", copy, "--max-new-tokens", 0)
    assert "temperature is -1.0" in error_of("chat", copy, "--temperature", -1)
    remove(copy / "chat_template.jinja")
    assert "chat_template.jinja" in error_of("chat", copy)


def test_interrupt_stops_the_reply_and_keeps_the_session(bundle, monkeypatch, capsys):
    session = Session(load_tiny(bundle, draft_tokens=3))
    left = [5]

    def interrupting(ids, logits):
        left[0] -= 1
        if not left[0]:
            signal.raise_signal(signal.SIGINT)
        return logits

    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{FIRST}\n{SECOND}\n"))
    talk = Chat(session, lambda: Settings(60, GREEDY, interrupting))
    run(talk)
    output, errors = capsys.readouterr()
    assert errors == "[cancelled]\n"
    first, second = (message["content"] for message in talk.messages[1::2])
    assert api_replies(bundle, FIRST)[0].startswith(first) and len(first) < 40
    assert output == f"{first}\n{second}\n" and second
    assert talk.last.reused_tokens > 10
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# What is shown, with made-up replies


class Scripted:
    """Stands for a Session: gives its events, remembers what it was asked."""

    def __init__(self, *replies: list):
        self._replies, self.asked, self.variables = list(replies), [], []
        self.pair = SimpleNamespace(manifest=SimpleNamespace(name="made up"))
        self.cancel = None

    def stream_chat(self, messages, settings, variables):
        self.asked.append(messages)
        self.variables.append(variables)
        events = [*self._replies.pop(0), End(None)]
        yield from events
        yield Reply(tuple(events), (2,), (3,), "stop", 0, 0, GREEDY, (), 0.0, 0.0)


def talk(session: Scripted, monkeypatch, terminal: bool = False, think: bool = True) -> str:
    output = io.StringIO()
    output.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    monkeypatch.setattr(sys, "stdout", output)
    run(Chat(session, Settings, think=think))
    return output.getvalue()


CALL, BROKEN = ToolCall("look", {"at": "stars"}), MalformedToolCall("<|tool_call>x", "it is not closed")


@pytest.mark.parametrize("terminal", [False, True])
def test_thoughts_are_marked_calls_shown_and_thoughts_left_out_of_the_history(monkeypatch, terminal):
    session = Scripted([ThoughtDelta("hm, "), ThoughtDelta("so"), TextDelta("Yes"), CALL], [BROKEN, TextDelta("No")])
    shown = talk(session, monkeypatch, terminal)
    before, after = (DIM, PLAIN) if terminal else ("(thought) ", "")
    assert shown == (
        f'{before}hm, so{after}\nYes\n[tool call] look({{"at": "stars"}})\n\n'
        "\n[malformed tool call: it is not closed] <|tool_call>x\nNo\n"
    )
    assert session.variables == [{"enable_thinking": True}] * 2
    assert session.asked[1][0] == {"role": "user", "content": "one"}
    answer = session.asked[1][1]
    assert answer["content"] == "Yes" and answer["tool_calls"][0]["function"]["arguments"] == {"at": "stars"}
    assert "hm" not in str(session.asked[1])
    assert session.asked[1][2] == {"role": "user", "content": "two"}


def test_without_think_the_template_gets_no_variable(monkeypatch):
    session = Scripted([TextDelta("a")], [TextDelta("b")])
    assert talk(session, monkeypatch, think=False) == "a\nb\n"
    assert session.variables == [None, None]
