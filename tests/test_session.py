"""A session over turns: the text is what a fresh one writes from the same ids, whatever was said, cancelled, rewound or
saved before; rows are reused where they are held, and where not, it says how many tokens it runs again."""

import dataclasses
import itertools
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_py import session_file
from runtime_py.drafting import DraftPolicy
from runtime_py.events import End, MalformedToolCall, TextDelta, ThoughtDelta
from runtime_py.loading import Pair
from runtime_py.sampling import GREEDY, Sampling
from runtime_py.session import Session, SessionBusy, Settings
from runtime_py.stops import StopStrings

from .conftest import BACKENDS
from .doubles import EOS, TOKENS, Script, ScriptedDrafter, ScriptedTarget, cached_ids
from .reference import load_tiny

PROMPT = [2, 50, 60, 70, 80]
TEXT = SimpleNamespace(
    is_skipped=lambda token: False,
    is_byte=lambda token: False,
    decode=lambda ids: "".join(f"{token}," for token in ids),
)


def scripted(script: Script, drafts: int = 3, margin: int = 0, chunk: int = 4, context: int = 512) -> Session:
    pair = Pair(
        manifest=SimpleNamespace(tokens=TOKENS),
        backend="onnx",
        target=ScriptedTarget(script, chunk, context),
        drafter=ScriptedDrafter(script, lambda block: block % 3),
        off_reason=None,
        policy=DraftPolicy(drafts),
        text=TEXT,
        load_s=0.0,
    )
    return Session(pair, margin_rows=margin)


def asked(tokens: int) -> Settings:
    return Settings(tokens, GREEDY)


def cancel_after(session: Session, calls: int) -> None:
    """Another thread cancels while the target runs its call number `calls` from now."""
    forward, left = session.pair.target._new_rows, [calls]

    def counted(cache, ids):
        left[0] -= 1
        if left[0] == 0:
            thread = threading.Thread(target=session.cancel)
            thread.start()
            thread.join()
        return forward(cache, ids)

    session.pair.target._new_rows = counted


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    window=st.integers(2, 12),
    chunk=st.integers(1, 12),
    margin=st.integers(0, 30),
    drafts=st.integers(0, 5),
)
def test_any_turns_give_the_text_of_a_fresh_session(data, window, chunk, margin, drafts):
    """Each turn keeps a beginning of the text, as a re-rendered conversation does, and goes on differently."""
    script = Script(window)
    session = scripted(script, drafts, margin, chunk)
    for _ in range(data.draw(st.integers(1, 5), "turns")):
        kept = data.draw(st.integers(0, len(session.ids)), "kept")
        ids = [
            *session.ids[:kept],
            7 if session.ids[kept : kept + 1] != [7] else 8,
            *data.draw(st.lists(st.integers(3, 9), max_size=9), "more"),
        ]
        known = min(kept, session._cache.length)
        held = max(rows for rows in range(known + 1) if session._cache.holds(rows))
        reply = session.generate(ids, asked(data.draw(st.integers(1, 20), "budget")))
        assert list(reply.token_ids) == script.reference(ids, len(reply.token_ids))
        assert session.ids == ids + list(reply.token_ids)
        assert cached_ids(session._cache) == session.ids[:-1]
        assert reply.reused_tokens == held
        assert reply.rerun_tokens == known - reply.reused_tokens


def test_next_turn_runs_only_what_is_new():
    session = scripted(Script(stops=frozenset({len(PROMPT) + 6})), chunk=128)
    first = session.generate(PROMPT, asked(50))
    assert (first.stop_reason, first.token_ids[-1], first.reused_tokens) == ("stop", EOS, 0)
    assert cached_ids(session._cache) == session.ids, "with the stop token"
    more = [*session.ids, 30, 31]
    session.pair.target.calls.clear()
    second = session.generate(more, asked(1))
    assert (second.reused_tokens, second.rerun_tokens) == (len(more) - 2, 0)
    assert session.pair.target.calls == [2]


def test_what_is_no_longer_held_is_run_again_and_counted():
    script = Script(window=4)
    session = scripted(script, margin=4, chunk=4)
    session.generate(PROMPT, asked(40))
    ids = [*session.ids[:20], 9]
    reply = session.generate(ids, asked(5))
    assert (reply.reused_tokens, reply.rerun_tokens) == (0, 20)
    assert list(reply.token_ids) == script.reference(ids, 5)
    assert session.generate([*ids, 8], asked(1)).reused_tokens == 21


def test_rewind():
    script = Script(window=4)
    session = scripted(script, margin=8, chunk=4)
    session.generate(PROMPT, asked(40))
    text = list(session.ids)
    assert session.rewind(len(text) - 5) == 0
    assert session.ids == text[:-5] == cached_ids(session._cache)
    assert session.generate(session.ids, asked(5)).token_ids == tuple(text[-5:])
    assert session.rewind(10) == 10, "too far back"
    assert session.generate(session.ids, asked(35)).token_ids == tuple(text[10:])
    with pytest.raises(ValueError, match="cannot rewind to 46: the session has 45 tokens"):
        session.rewind(46)


@pytest.mark.parametrize("calls", range(1, 9))
def test_cancelled_from_another_thread_in_the_middle_of_a_call(calls):
    """Of the prompt's chunks (the first 5) or of a block."""
    script, prompt = Script(), list(range(3, 23))
    session = scripted(script, chunk=4)
    cancel_after(session, calls)
    *events, reply = session.stream(prompt, asked(50))
    assert reply.stop_reason == "cancelled"
    assert reply.text == "".join(event.text for event in events if isinstance(event, TextDelta))
    assert session.ids == prompt + list(reply.token_ids)
    assert list(reply.token_ids) == script.reference(prompt, len(reply.token_ids))
    assert (len(reply.token_ids) == 0) == (calls < 5) and len(reply.token_ids) < 20
    again = session.generate(session.ids, asked(9))
    assert list(again.token_ids) == script.reference(list(again.prompt_ids), 9)
    assert again.reused_tokens >= 4 * min(calls, 4)


def test_cancel_between_calls_is_of_no_account():
    session = scripted(Script())
    session.cancel()
    assert session.generate(PROMPT, asked(5)).stop_reason == "length"


def test_two_threads_at_once_are_refused():
    session, errors = scripted(Script()), []
    stream = session.stream(PROMPT, asked(20))
    next(stream)

    def intrude() -> None:
        for call in (lambda: session.generate(PROMPT), lambda: session.rewind(0), lambda: session.save("x")):
            try:
                call()
            except SessionBusy as error:
                errors.append(str(error))

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    assert errors == ["the session is in use; wait for its call to end, or open another session"] * 3
    *_, reply = stream
    assert list(reply.token_ids) == Script().reference(PROMPT, 20)
    session.rewind(0)


def test_two_sessions_on_one_model_at_once_are_refused():
    first = scripted(Script())
    second = Session(first.pair)
    stream = first.stream(PROMPT, asked(20))
    next(stream)
    with pytest.raises(SessionBusy, match="another session runs on this model; wait for its call to end, or load it"):
        second.generate(PROMPT, asked(5))
    stream.close()
    assert list(second.generate(PROMPT, asked(5)).token_ids) == Script().reference(PROMPT, 5)


@pytest.mark.parametrize("length", [-1, 9, 2.5, "a"])
def test_a_rewind_that_cannot_be_changes_nothing(length):
    session = scripted(Script())
    session.generate(PROMPT, asked(3))
    with pytest.raises(ValueError, match=f"cannot rewind to {length}: the session has 8 tokens"):
        session.rewind(length)
    assert len(session.ids) == 8


def test_a_stream_that_is_left_leaves_a_usable_session():
    session = scripted(Script())
    stream = session.stream(PROMPT, asked(50))
    for _ in range(3):
        next(stream)
    stream.close()
    assert session.ids == PROMPT + Script().reference(PROMPT, len(session.ids) - len(PROMPT))
    reply = session.generate([*session.ids, 9], asked(3))
    assert reply.reused_tokens >= len(reply.prompt_ids) - 2


def test_full_context_ends_the_reply_and_loses_nothing():
    script, context = Script(), len(PROMPT) + 7
    session = scripted(script, context=context)
    reply = session.generate(PROMPT, asked(50))
    assert (reply.stop_reason, len(session.ids)) == ("context", context)
    assert session.ids == PROMPT + script.reference(PROMPT, 7)
    assert session.generate(session.ids, asked(5)).stop_reason == "context"
    assert session.ids == PROMPT + script.reference(PROMPT, 7)
    session.rewind(context - 2)
    assert session.generate(session.ids, Settings(sampling=GREEDY)).stop_reason == "context"
    assert session.ids == PROMPT + script.reference(PROMPT, 7)


@pytest.mark.parametrize(
    ("ids", "budget", "message"),
    [
        ([], 3, "the prompt is empty; give at least one token"),
        ([2, -1], 3, "token id -1 is outside"),
        ([*PROMPT, 10**6], 3, "token id 1000000 is outside"),
        ([2] * 21, 3, "prompt has 21 tokens, the context holds 20"),
        ([2, True], 3, "token id True is no whole number"),
        ([2, 5.0], 3, "token id 5.0 is no whole number"),
        ([2, "a"], 3, "token id 'a' is no whole number"),
        (PROMPT, 0, "max_new_tokens is 0"),
    ],
)
def test_refused_request_changes_nothing(ids, budget, message):
    session = scripted(Script(), context=20)
    session.generate(PROMPT, asked(4))
    before = list(session.ids)
    with pytest.raises(ValueError, match=message):
        session.generate(ids, asked(budget))
    assert session.ids == before and cached_ids(session._cache) == before[:-1]


# Stop texts


@given(
    text=st.text("abc", max_size=20),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
def test_text_ends_before_the_first_stop_text_however_it_comes(text, stop, cuts):
    """The stop text that is complete first; pieces as tokens are."""
    stops, places, passed = StopStrings(stop), [0, *sorted(cuts), len(text)], []
    for start, end in itertools.pairwise(places):
        passed += stops.push([TextDelta(text[start:end])] if end > start else [])
    passed += stops.push([End(None)])
    assert passed.pop() == End(None)
    shown = "".join(event.text for event in passed)
    assert text.startswith(shown)
    assert not any(part in shown for part in stop)
    assert stops.found == any(part in text for part in stop)
    if stops.found:
        assert any(text[len(shown) :].startswith(part) for part in stop)
    else:
        assert shown == text


def test_nothing_comes_after_a_stop_text_but_the_end():
    stops = StopStrings(("ab",))
    later = [TextDelta("b"), ThoughtDelta("c"), MalformedToolCall("call", "unclosed"), End("thought")]
    assert stops.push([TextDelta("xab"), *later]) == [TextDelta("x"), End("thought")]


@pytest.mark.parametrize("drafts", [1, 2, 5])
def test_a_stop_text_ends_at_the_same_token_however_many_are_drafted(drafts):
    plain = scripted(Script(), drafts=0)
    whole = plain.generate(PROMPT, asked(30)).token_ids
    for place in range(3, 12):
        settings = dataclasses.replace(asked(30), stop=(f",{whole[place]},",))
        plain, drafted = scripted(Script(), drafts=0), scripted(Script(), drafts)
        first, second = plain.generate(PROMPT, settings), drafted.generate(PROMPT, settings)
        assert (first.text, first.token_ids) == (second.text, second.token_ids)
        assert first.stop_reason == second.stop_reason == "stop" and drafted.ids == plain.ids
        assert cached_ids(drafted._cache) == drafted.ids[: drafted._cache.length]
        more = [session.generate([*session.ids, 9], asked(5)).token_ids for session in (plain, drafted)]
        assert more[0] == more[1]


def test_stop_texts_are_looked_for_in_the_answer_alone():
    stops = StopStrings(("ab",))
    events = stops.push([TextDelta("a"), ThoughtDelta("ab"), TextDelta("b"), TextDelta("xab"), TextDelta("y")])
    assert events == [TextDelta("a"), ThoughtDelta("ab"), TextDelta("b"), TextDelta("x")]
    with pytest.raises(ValueError, match="a stop text is empty"):
        StopStrings(("",))


# With a bundle


@pytest.fixture(scope="module", params=BACKENDS)
def bundle(request, bundle_of):
    return bundle_of("tiny", backend=request.param)


@pytest.fixture(scope="module")
def pair(bundle):
    return load_tiny(bundle, draft_tokens=3)


@pytest.mark.parametrize("drafter", ["mtp", "auto"])
def test_a_sampled_text_is_the_same_however_it_is_drafted(pair, bundle, drafter):
    sampled = Settings(120, Sampling(True, 1.0, top_k=64, top_p=0.95, seed=7))
    plain = Session(load_tiny(bundle, draft_tokens=0)).generate("ROMEO:", sampled)
    for count in (1, 3, None):
        reply = Session(load_tiny(bundle, draft_tokens=count, drafter=drafter)).generate("ROMEO:", sampled)
        assert reply.token_ids == plain.token_ids, count
        assert sum(one.accepted for one in reply.rounds) > 0 or count is None


def test_rerendered_conversation_reuses_all_before_the_new_message(pair):
    session, messages, whole = Session(pair), [], 0
    for question in ("Good morrow.", "How are you?", "Who is there?", "Farewell."):
        messages.append({"role": "user", "content": question})
        before = list(session.ids)
        reply = session.chat(messages, asked(80))
        assert reply.token_ids == Session(pair).chat(messages, asked(80)).token_ids
        assert reply.rerun_tokens == 0
        same = [
            a for a, b in itertools.takewhile(lambda two: two[0] == two[1], zip(before, reply.prompt_ids, strict=False))
        ]
        assert reply.reused_tokens == len(same)
        whole += before != [] and same == before
        messages.append(reply.message())
    assert whole, "turns that ended with a stop token are in the next prompt to the last token"


def test_rewound_text_is_the_same_text(pair):
    """With the real graphs: rows that are reused have the bits of rows run anew."""
    session = Session(pair)
    whole = session.generate("ROMEO:", asked(300))
    text = [*whole.prompt_ids, *whole.token_ids]
    for length in (290, 250, 130, 20):
        assert session.rewind(length) == 0
        again = session.generate(session.ids, asked(len(text) - length))
        assert (session.ids, again.reused_tokens) == (text, length - 1)


def test_saved_session_goes_on_where_it_was(pair, bundle, tmp_path):
    session, path = Session(pair), tmp_path / "a.safetensors"
    session.generate("ROMEO:", asked(200))
    session.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    other = Session(load_tiny(bundle, draft_tokens=0))
    other.restore(path)
    assert other.ids == session.ids
    prompt = [*session.ids, 30, 31]
    mine, theirs = (each.generate(prompt, asked(40)) for each in (session, other))
    assert mine.token_ids == theirs.token_ids
    assert mine.reused_tokens == theirs.reused_tokens == len(mine.prompt_ids) - 3


def test_what_is_no_file_is_not_replaced_by_a_saved_session(pair, tmp_path):
    session, path = Session(pair), tmp_path / "saved"
    session.generate("ROMEO:", asked(4))
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(ValueError, match="is no regular file; give another name"):
            session.save(tmp_path / name)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "link.part").write_text("of another")
    session.save(tmp_path / "link")
    assert path.is_file() and (tmp_path / "link").is_symlink()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "link.part", "pipe", "saved"]


def test_saved_session_of_another_bundle_or_a_damaged_one_is_refused(pair, tmp_path, monkeypatch):
    session, path = Session(pair), tmp_path / "a.safetensors"
    session.generate("ROMEO:", asked(30))
    session.save(path)
    before = list(session.ids)
    others = {
        "another bundle wrote it": dataclasses.replace(pair, manifest=dataclasses.replace(pair.manifest, name="other")),
        f"backend is {pair.backend}, not another": dataclasses.replace(pair, backend="another"),
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=message):
            Session(other).restore(path)
    with pytest.raises(ValueError, match="of another context size"):
        Session(pair, max_context_tokens=20).restore(path)
    monkeypatch.setattr(session_file, "FORMAT", "gemma4-mtp session 3")
    with pytest.raises(ValueError, match="format is gemma4-mtp session 2, not gemma4-mtp session 3"):
        session.restore(path)
    monkeypatch.undo()
    for damage in (b"", path.read_bytes()[:-1], b"\xff" * 100):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match="no session file"):
            session.restore(path)
    with pytest.raises(ValueError, match="no such file"):
        session.restore(tmp_path / "none")
    assert session.ids == before
    np.testing.assert_array_equal(session._cache.length, len(before) - 1)
