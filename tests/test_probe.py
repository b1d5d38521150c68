"""What drafting costs, measured on doubles with a clock of their own: the ratios and the verdict follow from the costs
given, and a row that differs in a block is counted."""

import json
import re
from collections.abc import Callable

import numpy as np
import pytest

from runtime_py.__main__ import main
from runtime_py.probe import MAX_REPEATS, MIN_REPEATS, as_json, lines, needed_acceptance, probe, tokens_of, verdict

from .doubles import Script, ScriptedDrafter, ScriptedTarget
from .edits import error_line


class TimedTarget(ScriptedTarget):
    """cost: rows -> seconds; wrong: (rows, logits) -> what the block gives instead."""

    def __init__(
        self, cost: Callable[[int], float], wrong: Callable[[np.ndarray], None] = lambda logits: None, **sizes
    ):
        super().__init__(Script(), **sizes)
        self.now, self._cost, self._wrong = 0.0, cost, wrong

    def forward(self, cache, ids, last_row_only=False):
        self.now += self._cost(len(ids))
        output = super().forward(cache, ids, last_row_only)
        self._wrong(output.logits)
        return output


class TimedDrafter(ScriptedDrafter):
    def draft(self, cache, token, hidden, count):
        self.target.now += self.seconds * count
        return super().draft(cache, token, hidden, count)


def measured(cost: Callable[[int], float], draft_s: float | None = None, max_tokens: int | None = None, **target):
    target = TimedTarget(cost, **target)
    drafter = TimedDrafter(target.script, lambda block: 0)
    drafter.target, drafter.seconds = target, draft_s
    return probe(target, drafter if draft_s is not None else None, max_tokens, clock=lambda: target.now)


def test_costs_are_those_that_were_given():
    result = measured(lambda rows: 0.1 + 0.02 * rows, 0.012)
    assert result.repeats == MIN_REPEATS  # seconds are gone by then
    assert result.context_tokens == 160
    for rows, entry in result.verify_s.items():
        assert entry == pytest.approx([0.1 + 0.02 * rows] * 3)
        assert result.ratios()[rows] == pytest.approx((0.1 + 0.02 * rows) / 0.12)
    assert list(result.verify_s) == [1, 2, 3, 4, 5, 6, 7, 9, 13, 17]
    assert result.draft_s == pytest.approx([0.012] * 3)
    assert result.costs()[4] == pytest.approx((0.2 + 4 * 0.012) / 0.12)
    assert not result.busy


def test_short_calls_are_measured_more_often():
    assert measured(lambda rows: 1e-5).repeats == MAX_REPEATS


def test_other_programs_only_add_time():
    """Most repeats are slow, and no ratio moves; a small call that always had bad luck costs no more than a larger one."""
    calls = iter(range(10**6))

    def cost(rows: int) -> float:
        slow = ((next(calls) - 1) // 10) % 2  # repeats of 10 calls each, after one for the drafter's hidden row
        return 0.1 + 0.01 * rows + (0.5 if slow else 0.2 if rows == 2 else 0)

    result = measured(cost, 0.01)
    assert result.busy and result.verify_s[1].median == pytest.approx(0.61)
    assert result.ratios()[2] == pytest.approx(0.13 / 0.11)  # of 3 rows
    assert result.ratios()[17] == pytest.approx(0.27 / 0.11)


def test_rows_alone_and_in_blocks_are_compared():
    assert (exact := measured(lambda rows: 1.0)).max_logit_difference == exact.argmax_flips == 0
    assert exact.rows_compared == sum((2, 3, 4, 5, 6, 7, 9, 13, 17))

    def shifted(logits: np.ndarray) -> None:
        if len(logits) == 3:
            logits[2] += np.float32(0.25)
        if len(logits) == 13:
            logits[7, 0] = 1.5  # above the scripted token's 1

    result = measured(lambda rows: 1.0, wrong=shifted)
    assert (result.max_logit_difference, result.argmax_flips) == (1.5, 1)


@pytest.mark.parametrize(("context", "rows"), [(132, 13), (130, 13), (20, 17), (5, 5), (1, 1)])
def test_a_short_context_gives_shorter_blocks(context, rows):
    result = measured(lambda count: 1.0, 0.1, context=context)
    assert max(result.verify_s) == rows  # of ROW_COUNTS
    assert result.context_tokens == max(0, context - 17)
    assert verdict(result.costs()).startswith("drafting cannot pay here") == (rows == 1)
    asked = measured(lambda count: 1.0, 0.1, max_tokens=context, context=500)
    assert (max(asked.verify_s), asked.context_tokens) == (rows, result.context_tokens)


def test_needed_acceptance_makes_up_for_the_cost():
    for count in (1, 3, 16):
        assert needed_acceptance(count, 1.0) == pytest.approx(0, abs=1e-9)
        assert needed_acceptance(count, count + 1) == pytest.approx(1)
        assert needed_acceptance(count, count + 1.01) is None
        assert tokens_of(count, needed_acceptance(count, 1.5)) == pytest.approx(1.5)
    assert needed_acceptance(1, 1.4) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("costs", "line"),
    [
        (
            {0: 1, 1: 1.2, 2: 1.4},
            "drafting pays here: at K = 2 from an acceptance of 0.31 on; at 0.60 it is expected to be 1.40x",
        ),
        ({0: 1, 1: 1.8, 2: 2.5}, "drafting pays here only from an acceptance of 0.80 on, at K = 1; at 0.60 plain"),
        (
            {0: 1, 1: 2.5, 2: 3.3},
            "drafting cannot pay here: 2 draft tokens and their verify cost 3.30 decodes and make at most 3",
        ),
    ],
)
def test_verdict_follows_from_the_costs(costs, line):
    assert verdict(costs).startswith(line)


def test_without_a_drafter_the_verdict_says_why():
    told = as_json(measured(lambda rows: 1.0), "file is missing")
    assert (told["verdict"], told["draft_s"]) == ("drafting is off: file is missing", None)
    lookup = as_json(measured(lambda rows: 1.0), None)
    assert lookup["verdict"].startswith("drafting pays here: at K = 16 from an acceptance of 0.00 on")
    assert lines(told)[-1] == "verdict: drafting is off: file is missing"


@pytest.mark.parametrize("backend", ["onnx"])
def test_command(bundle_of, capsys, backend):
    options = ["check", str(bundle_of("tiny", "int8", backend)), "--backend", backend, "--threads", "1"]
    assert main([*options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["bundle"], told["backend"], told["threads"]) == ("tiny", backend, 1)
    assert told["max_logit_difference"] == told["argmax_flips"] == 0  # int8 is row-invariant
    assert told["verify_ratio"]["1"] == 1 and told["draft_ratio"] > 0
    assert told["verdict"].startswith("drafting ")
    assert main(options) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0] == f"tiny on {backend}, threads: 1" and re.match(r"verdict[a-z, ]*: drafting ", text[-1])
    assert "--threads 0 is outside 1..256" in error_line(main, [*options[:-1], 0], capsys)
