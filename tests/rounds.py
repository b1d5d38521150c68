"""Golden rounds of the loop without a model: cases, and what Python makes of them. Java replays the same file.

    python -m tests.rounds   writes tests/golden_rounds.json anew

A case's turns each cut tokens off the text, append more and go on by a budget. A round tells its tokens, counts and drafter,
how many rows were committed after it, and the first position and the rows of every call of the target before it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from runtime_py.drafting import AutoPolicy, DraftPolicy
from runtime_py.speculative import generate

from .doubles import TOKENS, Script, ScriptedDrafter, ScriptedTarget

GOLDEN = Path(__file__).parent / "golden_rounds.json"
PROMPT = [2, 50, 60, 70, 80]


@dataclass(frozen=True)
class Periodic(Script):
    """A text that repeats itself, for drafts by lookup."""

    period: int = 1

    def next_token(self, full, sliding):
        return 10 + len(full) % self.period


class Recorded(ScriptedTarget):
    """It turns the clock that it is: a row costs 1, each row more `per_row`."""

    def __init__(self, script: Script, case: dict):
        super().__init__(script, case["chunk_rows"], case["context"])
        self.now, self.positions, self._per_row = 0.0, [], case["per_row"]

    def __call__(self) -> float:
        return self.now

    def forward(self, cache, ids, last_row_only=False):
        self.positions.append([cache.length, len(ids)])
        self.now += 1 + self._per_row * (len(ids) - 1)
        return super().forward(cache, ids, last_row_only)

    def append(self, cache, ids):
        self.positions.append([cache.length, len(ids)])
        super().append(cache, ids)


def case(turns, draft_tokens=3, schedule="constant", drafters=("mtp",), right=(), **sizes) -> dict:
    """turns: (tokens cut, tokens appended, budget) each"""
    policy = {"draft_tokens": draft_tokens, "schedule": schedule, "drafters": list(drafters)}
    named = [{"cut": cut, "more": list(more), "budget": budget} for cut, more, budget in turns]
    usual = {"window": 8, "chunk_rows": 16, "context": 512, "margin": 64, "stops": [], "period": 0, "per_row": 0.1}
    return {**usual, **sizes, "policy": policy, "right": list(right), "turns": named}


def cases() -> dict[str, dict]:
    once = [(0, PROMPT, 40)]
    again = [(0, PROMPT, 30), (0, [30, 31, 32], 20), (25, [9, 9], 20), (40, [8], 12)]
    return {
        "plain": case(once, 0),
        "one draft": case(once, 1, right=[1, 0, 1]),
        "three drafts": case(once, right=[3, 0, 1, 2]),
        "eight drafts, the window crossed in a block": case(once, 8, right=[8, 3, 5], window=9),
        "chunks of three": case(once, 8, right=[8], chunk_rows=3),
        "a window larger than the text": case(once, right=[2, 3], window=200),
        "heuristic": case([(0, PROMPT, 120)], 5, "heuristic", right=[5, 7, 4, 0, 0, 2, 9], window=17, chunk_rows=64),
        "stop token in a block": case(once, 4, right=[4, 2], stops=[14]),
        "stop token after a stop": case([(0, PROMPT, 40), (0, [40, 41], 40)], 4, right=[4], stops=[14, 30]),
        "stop token that no draft foresaw": case([(0, PROMPT, 40), (0, [40, 41], 40)], 2, right=[0], stops=[9, 20]),
        "context full": case([(0, PROMPT, 100)], 4, right=[4, 3], context=40),
        "turns, and some cut": case(again, right=[3, 1, 0]),
        "turns that go back beyond the margin": case(again, right=[3, 1, 0], margin=0, chunk_rows=8),
        "auto that pays": case([(0, PROMPT, 150)], None, right=[16], window=17, chunk_rows=128),
        "auto that does not": case([(0, PROMPT, 150)], None, right=[0], window=17, chunk_rows=128, per_row=0.9),
        "auto of two turns": case([(0, PROMPT, 90), (0, [7, 8], 90)], None, right=[16, 0, 3, 8, 1], chunk_rows=128),
        "lookup": case([(0, PROMPT, 90)], 6, drafters=["ngram"], period=9, chunk_rows=128),
        "both": case([(0, PROMPT, 150)], None, drafters=["mtp", "ngram"], right=[5, 0, 0, 9], period=7, chunk_rows=64),
    }


def replay(case: dict) -> list[dict]:
    """The rounds that runtime_py makes of a case."""
    stops, period = frozenset(case["stops"]), case["period"]
    script = Periodic(case["window"], stops, period) if period else Script(case["window"], stops)
    target, right = Recorded(script, case), case["right"]
    drafter = ScriptedDrafter(script, lambda block: right[block % len(right)]) if right else None
    given = case["policy"]
    policy = (
        AutoPolicy(tuple(given["drafters"]))
        if given["draft_tokens"] is None
        else DraftPolicy(given["draft_tokens"], given["schedule"], tuple(given["drafters"]))
    )
    cache, ids, rounds = target.new_cache(margin_rows=case["margin"]), [], []
    for turn in case["turns"]:
        del ids[len(ids) - turn["cut"] :]
        cache.rewind(cache.held(min(cache.length, len(ids))))
        ids += turn["more"]
        for entry in generate(target, drafter, cache, ids, turn["budget"], TOKENS, policy, clock=target):
            rounds.append(
                {
                    "tokens": list(entry.tokens),
                    "drafted": entry.drafted,
                    "accepted": entry.accepted,
                    "drafter": entry.drafter,
                    "stop_reason": entry.stop_reason,
                    "committed": cache.length,
                    "calls": list(target.positions),
                }
            )
            target.positions.clear()
    return rounds


def write() -> None:
    golden = {name: {"case": one, "rounds": replay(one)} for name, one in cases().items()}
    lines = (
        f'{json.dumps(name)}: {{"case": {json.dumps(entry["case"])}, "rounds": [\n'
        + ",\n".join(map(json.dumps, entry["rounds"]))
        + "\n]}"
        for name, entry in golden.items()
    )
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="ascii")


if __name__ == "__main__":
    write()
