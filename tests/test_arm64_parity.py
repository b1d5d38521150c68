"""What tools.arm64_parity holds of ARM64 against x86, on traces made here; where there is no emulator it says why."""

import platform

import numpy as np
import pytest

from tools import arm64_parity
from tools.arm64_parity import RMS_BOUND, TIE_MARGIN, compare, faults, report
from tools.greedy_trace import PromptTraces, Trace, read, save, trace_prompts

PROMPTS, TOKENS, VOCAB = 3, 10, 50
ROWS = {"rows_compared": 66, "max_logit_difference": 0.0}


def traces(noise: float = 0.0, margin: float = 3.0) -> list[PromptTraces]:
    """Replies whose best logit is `margin` above the next. noise: standard deviation of what another machine adds."""
    random, other = np.random.default_rng(0), np.random.default_rng(1)
    made = []
    for _ in range(PROMPTS):
        logits = random.normal(0, 1, (TOKENS, VOCAB)).astype(np.float32)
        logits[np.arange(TOKENS), random.integers(0, VOCAB, TOKENS)] = logits.max(1) + margin
        logits += noise * other.normal(0, 1, logits.shape).astype(np.float32)
        trace = Trace(logits.argmax(1), logits)
        made.append(PromptTraces(trace, trace, accepted=2))
    return made


def with_token(entry: PromptTraces, place: int, token: int) -> PromptTraces:
    ids = entry.plain.ids.copy()
    ids[place] = token
    trace = Trace(ids, entry.plain.logits)
    return PromptTraces(trace, trace, entry.accepted)


def test_the_same_or_nearly_the_same_is_no_fault():
    for noise in (0.0, RMS_BOUND / 2):
        found = compare(traces(), traces(noise))
        assert faults(found, ROWS) == [] and found.differences == ()
        assert (found.tokens, found.accepted) == (PROMPTS * TOKENS, PROMPTS * 2)
        assert "tokens: 3 of 3 replies are x86's, 30 of 30 tokens compared" in report(found, ROWS)[0]


@pytest.mark.parametrize("noise", [2 * RMS_BOUND, float("nan")])
def test_logits_too_far_apart_are_a_fault(noise):
    told = faults(compare(traces(), traces(noise)), ROWS)
    assert any("standard deviations, more than" in line for line in told)


def test_another_token_is_told_and_a_fault_unless_x86_had_a_near_tie():
    for margin, is_fault in ((TIE_MARGIN / 2, False), (2 * TIE_MARGIN, True)):
        here = traces(margin=margin)
        runner_up = int(np.argsort(here[1].plain.logits[4])[-2])
        led = here[1].plain.logits[4].max() - here[1].plain.logits[4, runner_up]
        found = compare(here, [here[0], with_token(here[1], 4, runner_up), here[2]])
        assert [(x.prompt, x.place) for x in found.differences] == [(1, 4)]
        assert found.differences[0].margin == pytest.approx(led)
        assert found.tokens == 2 * TOKENS + 5  # what follows the fifth token has another text before it
        assert (
            "2 of 3 replies are x86's, 24 of 25 tokens compared; first to differ: prompt 1 token 4"
            in report(found, ROWS)[0]
        )
        assert bool(faults(found, ROWS)) == is_fault


def test_a_drafted_text_must_be_the_plain_one_to_the_bit():
    plain = traces()
    last_bit = Trace(plain[2].plain.ids, np.nextafter(plain[2].plain.logits, np.float32(np.inf)))
    arm = [*plain[:2], PromptTraces(plain[2].plain, last_bit, 2)]
    assert faults(compare(plain, arm), ROWS) == ["prompt 2: its drafted text is not its plain text"]


def test_rows_of_blocks_must_be_the_rows_alone():
    assert len(faults(compare(traces(), traces()), ROWS | {"max_logit_difference": 1e-6})) == 1


def test_traces_of_a_bundle_hold_what_it_says_and_another_bundle_is_far_from_them(bundle_of, tmp_path):
    made = trace_prompts(bundle_of("tiny"), prompts=3, tokens=12, threads=1)
    save(tmp_path / "made.npz", made)
    kept = read(tmp_path / "made.npz")
    assert faults(compare(made, kept), ROWS) == [] and compare(made, kept).rms == 0
    for entry in kept:
        assert np.array_equal(entry.plain.ids, entry.plain.logits.argmax(1)) and len(entry.plain.ids) == 12
    assert sum(entry.accepted for entry in kept) > 0
    other = trace_prompts(bundle_of("tiny", "int4"), prompts=3, tokens=12, threads=1)
    assert compare(made, other).rms > 2 * RMS_BOUND


def test_without_an_emulator_it_says_why(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert arm64_parity.main(["--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("skipped: emulation is for x86 machines with Linux, this is riscv64")
