"""The HTTP API as OpenAI's own client sees it, over a real server: the tiny bundle's texts, and made-up sessions where a
request must wait, be left or call tools."""

import json
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import openai
import pytest
import uvicorn

from runtime_py.events import End, TextDelta, ThoughtDelta, ToolCall
from runtime_py.manifest import SamplingSpec
from runtime_py.openai_api import read_request
from runtime_py.sampling import GREEDY
from runtime_py.serve import make_app
from runtime_py.session import Reply, Session, Settings

from .command_line import ROOT, command, environment, error_of
from .conftest import BACKENDS
from .reference import load_tiny

MESSAGES, LIMITS = [{"role": "user", "content": "Good morrow."}], {"max_tokens": 40, "temperature": 0}
WAIT_S = 60  # for a thread that never comes


@contextmanager
def serving(session, **limits: int):
    """-> the address of a server that runs in a thread"""
    server = uvicorn.Server(uvicorn.Config(make_app(session, **limits), port=0, log_level="error", lifespan="off"))
    listener = server.config.bind_socket()
    listener.listen()  # a client may come before the thread does
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WAIT_S)


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


@pytest.fixture(scope="module", params=BACKENDS)
def bundle(request, bundle_of):
    return bundle_of("tiny", backend=request.param)


@pytest.fixture(scope="module")
def pair(bundle):
    return load_tiny(bundle, draft_tokens=3)


@pytest.fixture(scope="module")
def url(pair):
    with serving(Session(pair), max_request_bytes=100_000) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    return client_of(url)


def test_chat_completion(client, pair):
    expected = Session(pair).chat(MESSAGES, Settings(40, GREEDY))
    got = client.chat.completions.create(model="tiny", messages=MESSAGES, **LIMITS)
    assert (got.object, got.model, got.choices[0].message.role) == ("chat.completion", "tiny", "assistant")
    assert got.choices[0].message.content == expected.text
    assert got.choices[0].finish_reason == {"stop": "stop", "length": "length"}[expected.stop_reason]
    assert got.usage.prompt_tokens == len(expected.prompt_ids)
    assert got.usage.completion_tokens == len(expected.token_ids) == got.usage.total_tokens - got.usage.prompt_tokens
    again = client.chat.completions.create(model="tiny", messages=MESSAGES, **LIMITS)
    assert again.choices[0].message.content == expected.text
    assert again.usage.prompt_tokens_details.cached_tokens == len(expected.prompt_ids) - 1
    parts = [{"type": "text", "text": "Good "}, {"type": "text", "text": "morrow."}]
    of_parts = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}], **LIMITS)
    assert of_parts.choices[0].message.content == expected.text


def test_streamed_chat_is_the_whole_one_in_pieces(client, pair):
    expected = Session(pair).chat(MESSAGES, Settings(40, GREEDY))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = client.chat.completions.create(model="tiny", messages=MESSAGES, **LIMITS, **options)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text and len(chunks) > 4
    assert len({chunk.id for chunk in [*chunks, usage]}) == 1
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[:-1] == [None] * (len(chunks) - 1) and reasons[-1] in ("stop", "length")
    assert usage.choices == [] and usage.usage.completion_tokens == len(expected.token_ids)
    without = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **LIMITS))
    assert all(chunk.usage is None for chunk in without)


@pytest.mark.parametrize("stream", [False, True])
def test_completions(client, pair, stream):
    expected = Session(pair).generate("ROMEO:", Settings(40, GREEDY))
    for prompt in ("ROMEO:", ["ROMEO:"], list(expected.prompt_ids)):
        got = client.completions.create(model="tiny", prompt=prompt, stream=stream, **LIMITS)
        parts = list(got) if stream else [got]
        assert "".join(part.choices[0].text for part in parts) == expected.text
        assert parts[-1].choices[0].finish_reason == "length"
    stop = expected.text[10:14]
    got = client.completions.create(model="tiny", prompt="ROMEO:", stop=[stop], **LIMITS)
    assert got.choices[0].text == expected.text[: expected.text.index(stop)]
    assert got.choices[0].finish_reason == "stop"


def test_seed_and_context(client):
    options = {"model": "tiny", "prompt": "ROMEO:", "max_tokens": 30, "temperature": 1.0}
    first, again, other = (client.completions.create(**options, seed=seed).choices[0].text for seed in (3, 3, 4))
    assert first == again != other
    ids = [2] * 2040
    full = client.completions.create(model="tiny", prompt=ids, temperature=0)
    assert full.usage.total_tokens <= 2048 and full.choices[0].finish_reason in ("length", "stop")


def test_models_and_health(client, url):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "busy": False, "waiting": 0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": ["a", "b"]}, "a batch of 2 prompts is not supported"),
        ({"prompt": [2, -1]}, "token id -1 is outside 0..1023"),
        ({"prompt": [2, 5000]}, "token id 5000 is outside 0..1023"),
        ({"prompt": [2] * 2049}, "2049 tokens, the context holds 2048"),
        ({"prompt": 5}, "prompt must be a text or a list of token ids"),
        ({"n": 2}, "n 2 is not supported"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"temperature": -1}, "temperature is -1; it must be at least 0"),
        ({"temperature": 10**400}, "it must be finite"),
        ({"top_p": "x"}, "top_p must be of type float, not str"),
        ({"stop": ""}, "stop must be a text or up to 4, none empty"),
        ({"extra_body": {"suffix2": "b"}}, "suffix2 is not supported here"),
        ({"extra_body": {"n": True}}, "n true is not supported"),
        ({"extra_body": {"logprobs": 0}}, "logprobs 0 is not supported"),
        ({"extra_body": {"stream_options": 5}}, "stream_options must be of type dict, not int"),
        ({"extra_body": {"stream_options": {"include_usage": 1}}}, "include_usage must be of type bool, not int"),
        ({"extra_body": {"stream_options": {"often": True}}}, "stream_options.often is not supported here"),
    ],
)
def test_bad_request_is_one_line_and_400(client, changes, message, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**({"model": "tiny", "prompt": "a", **LIMITS, "stream": stream} | changes))
    assert message in caught.value.body["message"] and "\n" not in caught.value.body["message"]
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": []}, "the conversation is empty"),
        ({"messages": [{"content": "a"}]}, "messages[0]: expected an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only parts of type text"),
        ({"messages": [{"role": "strange", "content": "a"}]}, "unknown role 'strange'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "text": "a"}]}]}, "only parts of type text"),
        ({"messages": [{"role": "user", "content": 5}]}, "content must be a text or a list of parts"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 50_000}}]}]},
            "a JSON object",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}, "a JSON object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[1]"}}]}]}, "a JSON object"),
        ({"tools": [{"type": "function", "function": 1}]}, "tools[0]: expected type function and a function"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0]: expected type function"),
        ({"tool_choice": "required"}, 'tool_choice "required" is not supported'),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
    ],
)
def test_bad_chat_request_is_400(client, changes, message):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**({"model": "tiny", "messages": MESSAGES, **LIMITS} | changes))
    assert message in caught.value.body["message"]


def test_other_errors_are_objects_too(client, url):
    with pytest.raises(openai.NotFoundError, match="no model 'gpt' here; there is tiny"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings: Not Found"):
        client.embeddings.create(model="tiny", input="a")
    large = httpx.post(f"{url}/v1/completions", content=b" " * 100_001)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
    assert (
        httpx.post(f"{url}/v1/completions", content=b"{")
        .json()["error"]["message"]
        .startswith("the request is no JSON")
    )
    assert httpx.post(f"{url}/v1/completions", content=b"[" * 90_000).status_code == 400
    assert httpx.post(f"{url}/v1/completions", content=b"[]").status_code == 400
    odd = httpx.post(f"{url}/v1/chat/completions", content=rb'{"messages": [{"role": "\ud800", "content": "a"}]}')
    assert odd.status_code == 400 and "unknown role" in odd.json()["error"]["message"]


# Made-up sessions


class Scripted:
    """Stands for a Session: gives its events one by one, each only when the gate lets it."""

    def __init__(self, *events, gate: threading.Semaphore | None = None):
        self.pair = SimpleNamespace(manifest=SimpleNamespace(name="made up", sampling=SamplingSpec(False, 1.0, 0, 1.0)))
        self._events, self._gate = events, gate
        self.asked, self.started, self.cancelled, self.closed = [], threading.Semaphore(0), threading.Event(), []

    def cancel(self) -> None:
        self.cancelled.set()
        if self._gate:
            self._gate.release()  # a real session goes on to the end of its block

    def stream_chat(self, messages, settings, tools, variables):
        self.asked.append((messages, tools, variables))
        self.started.release()
        try:
            for event in (*self._events, End(None)):
                if self._gate and not self._gate.acquire(timeout=WAIT_S):
                    raise ValueError("the gate stays closed")
                yield event
            yield Reply((*self._events, End(None)), (2,), (3, 4), "stop", 0, 0, GREEDY, (), 0.0, 0.0)
        finally:
            self.closed.append(True)


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALLS = (ToolCall("look", {"at": "stars", "n": 2}), ToolCall("look", {}))


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_and_thoughts(stream):
    session = Scripted(ThoughtDelta("hm"), TextDelta("Well"), *CALLS)
    call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": '{"at": "moon"}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_0", "content": "dark"})
    variables = {"chat_template_kwargs": {"enable_thinking": True}}
    with serving(session) as address:
        got = client_of(address).chat.completions.create(
            model="made up", messages=messages, tools=[TOOL], stream=stream, extra_body=variables
        )
        parts = [chunk.choices[0] for chunk in got] if stream else [got.choices[0]]
    deltas = [part.delta if stream else part.message for part in parts]
    assert "".join(delta.content or "" for delta in deltas) == "Well"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        (call.name, call.arguments) for call in CALLS
    ]
    assert len({call.id for call in calls}) == 2
    assert not stream or [call.index for call in calls] == [0, 1]
    assert parts[-1].finish_reason == "tool_calls"
    asked, tools, given = session.asked[0]
    assert asked[1]["tool_calls"][0]["function"]["arguments"] == {"at": "moon"}
    assert (asked[2]["content"], tools, given) == ("dark", [TOOL], {"enable_thinking": True})


def test_one_at_a_time_and_no_more_in_line_than_there_is_room():
    gate = threading.Semaphore(0)
    session = Scripted(TextDelta("a"), gate=gate)
    texts: list[str] = []
    with serving(session, max_waiting=1) as address:
        client = client_of(address)

        def ask() -> None:
            texts.append(client.chat.completions.create(model="made up", messages=MESSAGES).choices[0].message.content)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        threads[0].start()
        assert session.started.acquire(timeout=WAIT_S)
        threads[1].start()
        while httpx.get(f"{address}/health").json() != {"status": "ok", "busy": True, "waiting": 1}:
            assert threads[1].is_alive()
        with pytest.raises(openai.RateLimitError, match="1 requests wait already; try again later"):
            client.chat.completions.create(model="made up", messages=MESSAGES)
        assert len(session.asked) == 1, "the second waits"
        gate.release(4)
        for thread in threads:
            thread.join(WAIT_S)
        assert (texts, len(session.asked)) == (["a", "a"], 2)


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_cancels_the_generation_and_frees_the_place(stream):
    gate = threading.Semaphore(int(stream))  # one event of a stream comes
    session = Scripted(*[TextDelta("a")] * 50, gate=gate)
    with serving(session) as address:
        body = {"messages": MESSAGES, "stream": stream}
        if stream:
            with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=WAIT_S) as answer:
                assert next(answer.iter_lines()).startswith("data: ")
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{address}/v1/chat/completions", json=body, timeout=httpx.Timeout(WAIT_S, read=0.3))
        assert session.cancelled.wait(WAIT_S)
        while httpx.get(f"{address}/health").json()["busy"]:
            pass
        assert session.closed == [True]
        gate.release(1000)
        assert httpx.post(f"{address}/v1/chat/completions", json={"messages": MESSAGES}).status_code == 200


def test_error_in_the_middle_of_a_stream_is_told():
    session = Scripted()

    def failing(messages, settings, tools, variables):
        yield TextDelta("a")
        raise ValueError("onnxruntime cannot run it")

    session.stream_chat = failing
    with serving(session) as address, pytest.raises(openai.APIError, match="onnxruntime cannot run it"):
        list(client_of(address).chat.completions.create(model="made up", messages=MESSAGES, stream=True))


def test_request_without_options_takes_the_bundles_sampling():
    defaults = SamplingSpec(True, 0.7, 64, 0.95)
    sampling = read_request({"messages": MESSAGES}, True, "tiny", defaults).settings.sampling
    assert (sampling.do_sample, sampling.temperature, sampling.top_k, sampling.top_p) == (True, 0.7, 64, 0.95)


# The command


def test_command_serves_and_ends_by_interrupt(bundle):
    process = subprocess.Popen(
        command("serve", bundle, "--port", 0, "--threads", 1),
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        encoding="utf-8",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        address = re.fullmatch(r"tiny on (http://127\.0\.0\.1:\d+)/v1\n", process.stderr.readline())[1]
        got = client_of(address).chat.completions.create(model="tiny", messages=MESSAGES, **LIMITS)
        assert got.choices[0].message.content
        port = address.rpartition(":")[2]
        taken = error_of("serve", bundle, "--port", port)
        assert f"--host 127.0.0.1 --port {port}: Address already in use; give another, or port 0" in taken
    finally:
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=WAIT_S)[1]
    assert "Traceback" not in errors


def test_bad_options_and_a_missing_extra_are_one_line(bundle, tmp_path):
    assert "--port 70000 is outside 0..65535" in error_of("serve", bundle, "--port", 70000)
    assert "no manifest.json" in error_of("serve", tmp_path)
    code = "import sys; sys.modules['starlette'] = None; from runtime_py.__main__ import main; sys.exit(main(sys.argv[1:]))"
    result = subprocess.run(
        [sys.executable, "-c", code, "serve", str(bundle)], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=60
    )
    assert result.returncode == 2
    assert re.fullmatch(
        r"error: starlette\S* is not installed; serve needs pip install -e '\.\[serve\]'\n", result.stderr
    )
