"""How many tokens are drafted, and by whom: never much slower than plain decoding, nearly as fast as the best fixed number,
on machines and texts made of numbers; and through the real loop with a clock that the doubles turn."""

import math
from dataclasses import replace

import pytest

from runtime_py.costs import (
    CREDIT,
    GUARD,
    MAX_DRAFT_TOKENS,
    PROBE_SHARE,
    Costs,
    Mean,
    Plan,
    Trial,
    decide,
    explain,
    learn,
    verify_seconds,
)
from runtime_py.drafting import AutoPolicy, DraftPolicy, agreement
from runtime_py.speculative import generate

from .doubles import TOKENS, Script, ScriptedDrafter, ScriptedTarget
from .simulation import TABLES, Phase, fixed_seconds, published, same, scenarios, simulate

PLAIN, BEST = 0.99, 0.95  # least throughput, of plain decoding's and of the best fixed number's
TEXT = 3000  # tokens

E2B = {task: published(1.36, 0.06, rate / 40.7) for task, rate in (("summarise", 47.5), ("code", 36.3), ("free", 38.1))}
E4B = {task: published(1.36, 0.04, rate / 17.0) for task, rate in (("summarise", 27.5), ("code", 26.2), ("free", 21.1))}
PUBLISHED = {
    **{f"published E2B, {task}": [phase] for task, phase in E2B.items()},
    **{f"published E4B, {task}": [phase] for task, phase in E4B.items()},
    "published E2B, one task after the other": [replace(phase, tokens=TEXT // 3) for phase in E2B.values()],
}
SCENARIOS = PUBLISHED | {
    f"{machine}, {text}": phases for machine, table in TABLES.items() for text, phases in scenarios(table, TEXT).items()
}


def shares(phases: list[Phase], seed: int, noise: float = 0.1) -> tuple[float, float]:
    """Throughput as a share of plain decoding's, and of the best fixed number's."""
    fixed = [fixed_seconds(phases, count) for count in range(MAX_DRAFT_TOKENS + 1)]
    seconds = simulate(phases, seed, noise).seconds
    return fixed[0] / seconds, min(fixed) / seconds


# The simulation


@pytest.mark.parametrize("name", SCENARIOS)
def test_throughput_in_every_scenario(name):
    plain, best = shares(SCENARIOS[name], seed=0)
    assert plain >= PLAIN
    assert best >= BEST


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("text", ["acceptance 0.1", "acceptance 0.9", "bad, then good"])
def test_throughput_with_more_and_less_noise(text, noise):
    plain, best = shares(scenarios(TABLES["XNNPACK 4 bit"], TEXT)[text], seed=1, noise=noise)
    assert plain >= PLAIN
    assert best >= BEST


def test_the_scenarios_tell_policies_apart():
    """No fixed number would pass them all, nor one that never probes again."""
    for count in range(MAX_DRAFT_TOKENS + 1):
        ratios = []
        for phases in SCENARIOS.values():
            fixed = [fixed_seconds(phases, k) for k in range(MAX_DRAFT_TOKENS + 1)]
            ratios.append((fixed[0] / fixed[count], min(fixed) / fixed[count]))
        assert min(ratio[0] for ratio in ratios) < PLAIN or min(ratio[1] for ratio in ratios) < BEST


def test_what_does_not_pay_is_off_and_what_pays_is_on():
    table = TABLES["llama.cpp 4 bit"]
    off, on = simulate([Phase(TEXT, table, same(0.2))], 0), simulate([Phase(TEXT, table, same(0.95))], 0)
    assert off.counts[0] > 0.95 * sum(off.counts.values())
    assert on.counts[0] < 0.1 * sum(on.counts.values())
    assert "drafting does not pay: verify of 2 rows costs 1." in explain(off.costs, "mtp") and explain(
        off.costs, "mtp"
    ).endswith("x of plain")
    assert explain(on.costs, "mtp") is None


def test_repetitive_text_is_drafted_by_lookup():
    table = TABLES["XNNPACK int8"]
    alone = Phase(TEXT, table, same(0.3))
    both = replace(alone, repeats=0.7, lookup=0.9)
    assert simulate([both], 0).seconds < 0.6 * simulate([alone], 0).seconds
    useless = replace(alone, repeats=0.7, lookup=0.05)
    assert simulate([useless], 0).seconds < 1.01 * simulate([alone], 0).seconds


# The record


def trial(plan: Plan, accepted: int, verify_s: float, draft_s: float = 0.0) -> Trial:
    agreed = {plan.source: (accepted, min(accepted + 1, plan.count))} if plan.source else {}
    return Trial(plan, plan.count, accepted, accepted + 1, draft_s, verify_s, agreed)


def test_verify_seconds_never_fall_with_more_rows():
    rows = {1: Mean(50.0, 9), 3: Mean(90.0, 2), 4: Mean(70.0, 5), 9: Mean(120.0, 1)}
    seconds = verify_seconds(rows)
    assert seconds == sorted(seconds)
    assert len(seconds) == MAX_DRAFT_TOKENS + 1
    assert abs(seconds[0] - 50) < 5


def test_rows_between_and_beyond_the_measured_ones_are_on_a_line():
    rows = {1: Mean(50.0, 100), 5: Mean(90.0, 100)}
    seconds = verify_seconds(rows)
    assert seconds[2] == pytest.approx(70, abs=1)
    assert 100 < seconds[8] <= 131


def test_plain_is_measured_before_anything_is_drafted():
    assert decide(Costs(), {"mtp": 4}) == Plan(None, 0)
    assert decide(Costs(rows={3: Mean(50.0, 1)}), {"mtp": 4}) == Plan(None, 0)
    assert decide(learn(Costs(), trial(Plan(None, 0), 0, 50.0)), {"mtp": 4}).count


def test_a_round_that_was_held_up_does_not_turn_drafting_off():
    """Another program had the processor for the time of a hundred rounds."""
    costs = learn(Costs(), trial(Plan(None, 0), 0, 50.0))
    for _ in range(20):
        costs = learn(costs, trial(Plan("mtp", 4), 4, 80.0, 10.0))
    assert learn(costs, trial(Plan("mtp", 4), 4, 5000.0, 10.0)).guard > 0
    for _ in range(20):  # always slow is the drafts' fault
        costs = learn(costs, trial(Plan("mtp", 4), 0, 300.0, 10.0))
    assert not decide(costs, {"mtp": 4}).count


@pytest.mark.parametrize("offers", [{}, {"mtp": 1}, {"ngram3": 5}])
def test_no_more_is_planned_than_offered(offers):
    costs = Costs(rows={1: Mean(50.0, 9)}, chances={"mtp": (Mean(0.99, 50),) * 16, "ngram3": (Mean(0.99, 50),) * 16})
    plan = decide(costs, offers)
    assert (plan.source, plan.count) == next(iter(offers.items()), (None, 0))


def test_probes_lose_no_more_than_their_share():
    """A drafter that is never right: all that is lost is what it had at the start, and the share of the time after it."""
    costs, lost, time = Costs(), 0.0, 0.0
    for _ in range(5000):
        plan = decide(costs, {"mtp": 8})
        verify, draft = 50.0 + 10 * plan.count, 3.0 * plan.count
        costs = learn(costs, trial(plan, 0, verify, draft))
        time += (verify + draft) / 50
        lost += (verify + draft) / 50 - 1
    assert 0 < lost < CREDIT + GUARD + PROBE_SHARE * time


def test_drafting_that_loses_in_fact_is_stopped_although_it_seems_to_pay():
    costs = Costs(rows={1: Mean(50.0, 30)}, chances={"mtp": (Mean(0.9, 1000),) * 8}, guard=-0.1)
    assert not decide(costs, {"mtp": 8}).count
    assert "pauses: its last rounds took longer than plain decoding" in explain(costs, "mtp")
    assert decide(replace(costs, guard=0.1), {"mtp": 8}).count


def test_record_is_the_same_for_the_same_rounds():
    first, again = (simulate(SCENARIOS["XNNPACK int8, bad, then good"], 5).costs for _ in range(2))
    assert first == again


def test_agreement_counts_the_places_that_were_tried():
    assert agreement([1, 2, 3], [1, 2, 9]) == (2, 3)
    assert agreement([1, 2, 3], [1, 2, 3, 4]) == (3, 3)
    assert agreement([1, 2, 3], [1]) == (1, 1)
    assert agreement([], [1]) == (0, 0)


# Through the loop, with a clock that the doubles turn


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedTarget(ScriptedTarget):
    def __init__(self, script, clock, per_row, **sizes):
        super().__init__(script, **sizes)
        self.clock, self.per_row = clock, per_row

    def forward(self, cache, ids, last_row_only=False):
        self.clock.now += 1 + self.per_row * (len(ids) - 1)
        return super().forward(cache, ids, last_row_only)


class Periodic(Script):
    """A text that repeats itself."""

    def next_token(self, full, sliding):
        return 10 + len(full) % 9


PROMPT = [2, 50, 60, 70, 80]


def timed(script, policy, tokens, per_row, right=None):
    """-> ids, rounds, seconds by the clock without the prefill."""
    clock, ids = Clock(), list(PROMPT)
    target = TimedTarget(script, clock, per_row, context=tokens + 10)
    drafter = ScriptedDrafter(script, lambda block: right) if right is not None else None
    rounds = list(generate(target, drafter, target.new_cache(), ids, tokens, TOKENS, policy, clock=clock))
    return ids[len(PROMPT) :], rounds, clock.now - 1


@pytest.mark.parametrize(("per_row", "right", "pays"), [(0.1, 8, True), (0.9, 0, False)])
def test_auto_through_the_loop(per_row, right, pays):
    script, policy = Script(window=17), AutoPolicy(("mtp",))
    ids, rounds, seconds = timed(script, policy, 150, per_row, right)
    assert ids == script.reference(PROMPT, 150)
    assert (seconds < 0.6 * 150) == pays
    assert seconds < 1.1 * 150
    assert (policy.off_reason() is None) == pays
    assert {entry.drafter for entry in rounds} == {None, "mtp"}


def test_what_was_learned_goes_on_in_the_next_text():
    script, policy = Script(window=17), AutoPolicy(("mtp",))
    timed(script, policy, 150, 0.9, 0)
    rounds = timed(script, policy, 20, 0.9, 0)[1]
    assert sum(entry.drafted > 0 for entry in rounds) <= 1


@pytest.mark.parametrize("policy", [DraftPolicy(6, drafters=("ngram",)), AutoPolicy(), AutoPolicy(("ngram",))])
def test_lookup_gains_on_repetitive_text_without_a_file(policy):
    script = Periodic(window=17)
    ids, rounds, seconds = timed(script, policy, 200, 0.1)
    assert ids == [10 + (len(PROMPT) + i) % 9 for i in range(200)]
    assert seconds < 0.5 * 200
    assert {entry.drafter for entry in rounds if entry.drafted} == {"ngram"}


def test_auto_takes_the_drafter_that_is_right():
    script = Periodic(window=17)
    rounds = timed(script, AutoPolicy(), 500, 0.1, right=0)[1]
    blocks = [entry.drafter for entry in rounds if entry.drafted]
    assert blocks.count("ngram") > 0.7 * len(blocks)


def test_lookup_on_a_text_without_repeats_is_plain_decoding():
    script = Script(window=17)
    ids, rounds, _ = timed(script, DraftPolicy(6, drafters=("ngram",)), 60, 0.1)
    assert ids == script.reference(PROMPT, 60)
    assert not any(entry.drafted for entry in rounds)


def test_plan_does_not_depend_on_the_unit_of_time():
    plans = []
    for unit in (1e-3, 1.0, 1e3):
        costs = Costs()
        for accepted in (0, 2, 1, 3, 0, 1, 2, 2):
            plan = decide(costs, {"mtp": 4})
            plans.append((unit, plan[:3]))
            costs = learn(costs, trial(plan, min(accepted, plan.count), (1 + 0.1 * plan.count) * unit, 0.1 * unit))
        assert math.isfinite(costs.guard)
    by_unit = [[plan for u, plan in plans if u == unit] for unit in (1e-3, 1.0, 1e3)]
    assert by_unit[0] == by_unit[1] == by_unit[2]
