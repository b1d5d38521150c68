"""The loop alone, with a scripted target and drafter over the real KVCache: drafted text is the text that plain decoding
writes, to the token, wherever drafts fail, texts stop, windows pass or a context ends; and the cache is right after
every round, so a caller may stop at any of them."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_py.drafting import MAX_DRAFT_TOKENS, DraftPolicy
from runtime_py.loading import Pair
from runtime_py.manifest import FULL, SLIDING
from runtime_py.measure import draft_statistics
from runtime_py.models import Drafter, rope_rows
from runtime_py.sampling import GREEDY
from runtime_py.session import Session, Settings
from runtime_py.speculative import Round, generate

from .doubles import EOS, TOKENS, VOCAB, Script, ScriptedDrafter, ScriptedTarget, cached_ids

PROMPT = [2, 50, 60, 70, 80]
MAX_K = 8
PLAIN = DraftPolicy(0)


def run(target, drafter, ids, budget, policy=PLAIN, cache=None, leave_after=10**6) -> list[Round]:
    """Generate, at most `leave_after` rounds, and check after each of them what a caller may rely on."""
    cache, start, rounds = cache or target.new_cache(), len(ids), []
    rows = generate(target, drafter, cache, ids, budget, TOKENS, policy)
    for entry in rows:
        rounds.append(entry)
        assert ids[start:] == [token for round_ in rounds for token in round_.tokens]
        if entry.tokens:
            assert cached_ids(cache) == (ids if entry.stop_reason == "stop" else ids[:-1])
        if len(rounds) == leave_after:
            rows.close()
    return rounds


def drafted(script, ids, budget, count, right, **sizes) -> tuple[list[Round], ScriptedDrafter]:
    """`count` drafts a block, the first `right` of them right (a number, or a function of the block's number)."""
    drafter = ScriptedDrafter(script, right if callable(right) else lambda block: right)
    return run(ScriptedTarget(script, **sizes), drafter, ids, budget, DraftPolicy(count)), drafter


@pytest.mark.parametrize(("count", "right"), [(k, m) for k in range(1, MAX_K + 1) for m in range(k + 1)])
def test_accepts_exactly_the_right_drafts(count, right):
    script, ids, budget = Script(window=MAX_K + 1), list(PROMPT), 40
    rounds, _ = drafted(script, ids, budget, count, right)
    left = budget - 1  # the first token comes from the prefill
    for entry in rounds[1:]:
        assert entry.drafted == min(count, left - 1)
        assert entry.accepted == min(right, entry.drafted) == len(entry.tokens) - 1
        left -= len(entry.tokens)
    assert left == 0
    assert ids == PROMPT + script.reference(PROMPT, budget)


@pytest.mark.parametrize("count", range(MAX_K + 1))
def test_gives_exactly_the_tokens_asked_for(count):
    script = Script(window=MAX_K + 1)
    for budget in range(1, 21):
        for right in {0, 1, count // 2, count}:
            ids = list(PROMPT)
            rounds, _ = drafted(script, ids, budget, count, right)
            assert ids == PROMPT + script.reference(PROMPT, budget)
            assert len(ids) == len(PROMPT) + budget
            assert [entry.stop_reason for entry in rounds] == [None] * (len(rounds) - 1) + ["length"]


def test_zero_drafts_and_no_drafter_are_the_same_plain_decoding():
    script = Script()
    for count, drafter in ((0, ScriptedDrafter(script, lambda block: 0)), (MAX_K, None)):
        target, ids = ScriptedTarget(script), list(PROMPT)
        rounds = run(target, drafter, ids, 9, DraftPolicy(count))
        assert ids == PROMPT + script.reference(PROMPT, 9)
        assert target.calls == [len(PROMPT)] + [1] * 8
        assert {(entry.drafted, entry.accepted) for entry in rounds} == {(0, 0)}


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("right", range(5))
def test_stop_token_at_every_place_of_a_block(place, right):
    """place 0: the very first token; then accepted drafts, the target's own token, and the same in the next block"""
    count, script, ids = 4, Script(stops=frozenset({len(PROMPT) + place})), list(PROMPT)
    rounds, _ = drafted(script, ids, 50, count, right)
    assert ids == PROMPT + script.reference(PROMPT, place + 1)
    assert ids[-1] == EOS
    assert ids.count(EOS) == 1
    assert rounds[-1].stop_reason == "stop"
    before = place - 1  # tokens of blocks before the stop token
    if place:
        assert rounds[-1].drafted == count
        assert rounds[-1].accepted == min(right, before % (right + 1) + 1), "drafts after the stop token do not count"


def test_stop_token_wins_over_a_budget_that_ends_with_it():
    script = Script(stops=frozenset({len(PROMPT) + 3}))
    for right in range(4):
        rounds, _ = drafted(script, list(PROMPT), 4, 3, right)
        assert rounds[-1].stop_reason == "stop"


@pytest.mark.parametrize("right", range(5))
@pytest.mark.parametrize("room", range(1, 13))
def test_context_full_at_every_place_of_a_block(room, right):
    script, ids, context = Script(), list(PROMPT), len(PROMPT) + room
    rounds, _ = drafted(script, ids, 100, 4, right, context=context)
    assert ids == PROMPT + script.reference(PROMPT, 100, context)
    assert (len(ids), rounds[-1].stop_reason) == (context, "context")


def test_budget_that_just_fits_the_context_ends_by_length():
    rounds, _ = drafted(Script(), list(PROMPT), 6, 4, 4, context=len(PROMPT) + 6)
    assert rounds[-1].stop_reason == "length"


def test_stop_token_in_the_last_place_of_the_context_is_committed():
    context = len(PROMPT) + 4
    for right in range(4):
        ids = list(PROMPT)
        rounds, _ = drafted(Script(stops=frozenset({context - 1})), ids, 100, 3, right, context=context)
        assert (len(ids), rounds[-1].stop_reason) == (context, "stop")


def test_prompt_that_fills_the_context_gives_no_token():
    assert run(ScriptedTarget(Script(), context=len(PROMPT)), None, list(PROMPT), 3) == [Round((), 0, 0, "context")]


@pytest.mark.parametrize(
    ("ids", "budget", "message"),
    [
        (PROMPT, 3, "prompt has 5 tokens, the context holds 4"),
        ([], 3, "no token to run"),
        (PROMPT[:2], 0, "max_new_tokens is 0"),
        ([2, -1], 3, f"token id -1 is outside 0..{VOCAB - 1}"),
        ([2, VOCAB], 3, f"token id {VOCAB} is outside 0..{VOCAB - 1}"),
    ],
)
def test_bad_request_is_refused_before_anything_runs(ids, budget, message):
    target = ScriptedTarget(Script(), context=4)
    with pytest.raises(ValueError, match=message):
        run(target, None, list(ids), budget)
    assert target.calls == []


@pytest.mark.parametrize("window", range(4, 17))
@pytest.mark.parametrize("offset", range(-2, 3))
def test_window_is_crossed_in_the_middle_of_a_block(window, offset):
    script, prompt = Script(window), list(range(3, 3 + window + offset))
    for count in (0, 3, MAX_K):
        ids = list(prompt)
        drafted(script, ids, 2 * window, count, lambda block: block % 4)
        assert ids == prompt + script.reference(prompt, 2 * window)


@pytest.mark.parametrize("chunk_rows", [1, 3, 5])
def test_prompt_of_any_number_of_prefill_chunks(chunk_rows):
    script = Script(window=5)
    for length in range(1, 18):
        ids = list(range(3, 3 + length))
        expected = ids + script.reference(ids, 6)
        drafted(script, ids, 6, 4, 2, chunk_rows=chunk_rows)
        assert ids == expected


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("right", [0, 3, MAX_K])
def test_no_block_crosses_the_end_of_a_chunk(chunk_rows, right):
    """It is cut there, the text goes on as it would."""
    script, ids = Script(window=5), list(PROMPT)
    rounds, drafter = drafted(script, ids, 40, MAX_K, right, chunk_rows=chunk_rows)
    assert ids == PROMPT + script.reference(PROMPT, 40)
    for block in drafter.blocks[:-1]:
        assert block.count == min(MAX_K, chunk_rows - block.length % chunk_rows - 1, len(ids) - block.length - 2)
    assert max(entry.drafted for entry in rounds) == min(MAX_K, chunk_rows - 1)


@pytest.mark.parametrize("right", [0, 1, 3])
@pytest.mark.parametrize("leave_after", range(1, 8))
def test_second_turn_after_leaving_at_any_round(leave_after, right):
    script = Script()
    target, drafter, ids = ScriptedTarget(script), ScriptedDrafter(script, lambda block: right), list(PROMPT)
    cache = target.new_cache()
    run(target, drafter, ids, 60, DraftPolicy(3), cache, leave_after)
    ids += [30, 31, 32]
    expected = ids + script.reference(ids, 12)
    run(target, drafter, ids, 12, DraftPolicy(3), cache)
    assert ids == expected


@pytest.mark.parametrize("more", [[30, 31, 32], list(range(20, 45))])
@pytest.mark.parametrize(("budget", "stop_reason"), [(60, "stop"), (7, "length")])
def test_second_turn_after_a_text_ended(budget, stop_reason, more):
    script = Script(stops=frozenset({len(PROMPT) + 9}))
    target, drafter, ids = ScriptedTarget(script), ScriptedDrafter(script, lambda block: block % 3), list(PROMPT)
    cache = target.new_cache()
    assert run(target, drafter, ids, budget, DraftPolicy(3), cache)[-1].stop_reason == stop_reason
    ids += more
    expected = ids + script.reference(ids, 12)
    run(target, drafter, ids, 12, DraftPolicy(3), cache)
    assert ids == expected


def test_text_cut_by_its_budget_goes_on_without_new_ids():
    script = Script()
    target, ids = ScriptedTarget(script), list(PROMPT)
    cache = target.new_cache()
    for budget in (4, 5, 6):
        run(target, None, ids, budget, cache=cache)
    assert ids == PROMPT + script.reference(PROMPT, 15)


@pytest.mark.parametrize("window", [4, 8])
def test_drafter_sees_committed_rows_and_the_row_that_produced_the_pending_token(window):
    script, ids = Script(window), list(PROMPT)
    _, drafter = drafted(script, ids, 40, 3, lambda block: block % 4)
    for block in drafter.blocks:
        pending = block.length  # its position: N - 1, N counting it
        assert block.token == ids[pending]
        assert block.hidden == (pending - 1, ids[pending - 1], ids[pending])
        assert block.full == dict(enumerate(ids[:pending]))
        assert block.sliding == {i: ids[i] for i in range(max(0, pending - window), pending)}


def test_draft_position_is_that_of_the_pending_token_throughout_a_block():
    calls, inv_freq = [], {SLIDING: (1.0,), FULL: (0.5,)}

    def graph(feeds):
        calls.append(feeds)
        return {"logits": np.eye(1, VOCAB, 9 + len(calls)), "state": np.full((1, 3), len(calls), np.float32)}

    spec = SimpleNamespace(inv_freq=inv_freq, position_offset=-1, centroid_head=None)
    embed = SimpleNamespace(embed=lambda ids: np.full((1, 3), ids[0], np.float32))
    target, ids = ScriptedTarget(Script()), [*PROMPT, 33]
    cache = target.new_cache()
    target.append(cache, PROMPT)
    manifest = SimpleNamespace(drafter=spec, kv=cache.spec)
    drafts = Drafter(manifest, graph, None, embed).draft(cache, ids[-1], np.zeros(3, "f4"), 3)
    assert drafts == [10, 11, 12]
    assert [feeds["pair"][0].tolist() for feeds in calls] == [
        [33] * 3 + [0] * 3,
        [10] * 3 + [1] * 3,
        [11] * 3 + [2] * 3,
    ]
    for feeds in calls:
        for name, row in rope_rows(inv_freq, np.array([len(ids) - 1])).items():
            assert np.array_equal(feeds[name], row)
        assert feeds["k_full"][:, 0].tolist() == [[token, i] for i, token in enumerate(PROMPT)]


@pytest.mark.parametrize(
    ("schedule", "right", "counts"),
    [
        ("constant", [0, 5, 2, 5], [5, 5, 5, 5]),
        ("heuristic", [5, 7, 9, 11, 13, 15, 16, 16], [5, 7, 9, 11, 13, 15, 16, 16]),
        ("heuristic", [0] * 7, [5, 4, 3, 2, 1, 1, 1]),
        ("heuristic", [4, 4, 0, 5, 2, 6], [5, 4, 6, 5, 7, 6]),
    ],
)
def test_schedule(schedule, right, counts):
    script = Script(window=MAX_DRAFT_TOKENS + 1)
    drafter = ScriptedDrafter(script, lambda block: right[block])
    run(ScriptedTarget(script), drafter, list(PROMPT), 500, DraftPolicy(5, schedule), leave_after=1 + len(right))
    assert [block.count for block in drafter.blocks] == counts


def test_statistics_count_blocks_drafts_and_places():
    rounds, _ = drafted(Script(), list(PROMPT), 1 + 4 + 1 + 2 + 3, 3, lambda block: [3, 0, 1, 2][block])
    assert draft_statistics(rounds) == {
        "rounds": 4,
        "drafted": 3 + 3 + 3 + 2,  # the budget leaves room for two drafts in the last block
        "accepted": 3 + 0 + 1 + 2,
        "per_position": [
            {"drafted": 4, "accepted": 3},
            {"drafted": 4, "accepted": 2},
            {"drafted": 3, "accepted": 1},
        ],
        "per_drafter": {
            "mtp": {"rounds": 4, "drafted": 11, "accepted": 6},
            "ngram": {"rounds": 0, "drafted": 0, "accepted": 0},
        },
    }
    assert draft_statistics([Round((7,), 0, 0, "length")])["per_position"] == []


@pytest.mark.parametrize("final", [True, False], ids=["each id", "held back to the end"])
def test_generated_text_is_shown_to_its_end(final):
    script = Script(stops=frozenset({len(PROMPT) + 9}))
    text = SimpleNamespace(
        is_skipped=lambda token: False,
        is_byte=lambda token: not final,
        decode=lambda ids: "".join(f"{token}," for token in ids),
    )
    pair = Pair(
        manifest=SimpleNamespace(tokens=TOKENS),
        backend="onnx",
        target=ScriptedTarget(script),
        drafter=ScriptedDrafter(script, lambda block: block % 3),
        off_reason=None,
        policy=DraftPolicy(3),
        text=text,
        load_s=0.0,
    )
    *events, reply = Session(pair).stream(PROMPT, Settings(50, GREEDY))
    assert list(reply.token_ids) == script.reference(PROMPT, 50)
    assert reply.text == "".join(event.text for event in events[:-1]) == text.decode(reply.token_ids)
    assert reply.stop_reason == "stop"


@settings(max_examples=150, deadline=None)
@given(data=st.data(), window=st.integers(2, 12), prompt=st.integers(1, 30), count=st.integers(0, MAX_K))
def test_any_script_gives_the_text_of_plain_decoding(data, window, prompt, count):
    ids = [2, *range(10, 9 + prompt)]
    stops = data.draw(st.frozensets(st.integers(prompt, prompt + 60), max_size=3), "stops")
    right = data.draw(st.lists(st.integers(0, MAX_K), min_size=1, max_size=12), "right")
    turns = data.draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=3), "turns")
    script = Script(window, stops)
    chunk_rows = data.draw(st.integers(1, 24), "chunk_rows")
    target = ScriptedTarget(script, chunk_rows, context=prompt + data.draw(st.integers(0, 70), "room"))
    drafter = ScriptedDrafter(script, lambda block: right[block % len(right)])
    cache, policy = target.new_cache(), DraftPolicy(count, data.draw(st.sampled_from(["constant", "heuristic"])))
    for budget, leave_after in turns:
        if len(ids) >= target.context:
            break
        expected = ids + script.reference(ids, budget, target.context)
        rounds = run(target, drafter, ids, budget, policy, cache, leave_after)
        assert ids == expected[: len(ids)]
        assert len(ids) == len(expected) or rounds[-1].stop_reason is None
        ids.append(5)


def test_the_scripted_target_notices_a_wrong_row():
    """The double can fail: a wrong, moved or missing row of either layer changes its next token."""
    script, rows = Script(window=4), dict(enumerate([2, 3, 4, 5]))
    wrong = [{**rows, 1: 9}, {**rows, 1: 4, 2: 3}, {i + 1: token for i, token in rows.items()}, {0: 2, 1: 3, 2: 4}]
    right = script.next_token(rows, rows)
    assert right == script.after([2, 3, 4, 5])
    for other in wrong:
        assert right not in (script.next_token(other, rows), script.next_token(rows, other))
