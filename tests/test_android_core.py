"""The Java core of android_demo against runtime_py: the same rounds, token ids, counts, numbers and sentences. Its graphs are
the bundle's own .onnx files, held by a Python process (tests/graph_server.py)."""

import dataclasses
import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from runtime_py import kv_rows
from runtime_py import manifest as contract
from runtime_py.costs import Costs, Trial, decide, explain, learn
from runtime_py.cpus import sysfs_speeds, without_slowest_class
from runtime_py.drafting import DRAFTERS
from runtime_py.embeddings import EmbeddingTable
from runtime_py.loading import load
from runtime_py.manifest import KV_PARTS
from runtime_py.measure import draft_statistics
from runtime_py.memory import needs
from runtime_py.models import rope_rows
from runtime_py.sampling import WORD, Sampler, Sampling, uniform, weigh
from runtime_py.session import Reply, Session, Settings

from .jvm import CORE, Jvm, Refused, needs_jdk
from .pairs import TINY, PairShape
from .rounds import GOLDEN, cases, replay

SHAPE = PairShape(layers=4, period=2, shared=2, intermediate=64)
CONTEXT, MARGIN = 512, 1024
SAMPLED = Sampling(do_sample=True, temperature=0.9, top_k=64, top_p=0.95, seed=5)
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": SAMPLED,
    "all options": Sampling(True, 1.3, 0, 0.9, 0.02, 1.2, WORD),
}
POLICIES = {
    "plain": {"draft_tokens": 0, "schedule": "constant", "drafters": ["mtp"]},
    "1": {"draft_tokens": 1, "schedule": "constant", "drafters": ["mtp"]},
    "3": {"draft_tokens": 3, "schedule": "constant", "drafters": ["mtp"]},
    "heuristic": {"draft_tokens": 4, "schedule": "heuristic", "drafters": ["mtp"]},
    "lookup": {"draft_tokens": 5, "schedule": "constant", "drafters": ["ngram"]},
    "auto": {"draft_tokens": None, "schedule": None, "drafters": list(DRAFTERS)},
}

# What needs no JVM


def golden() -> dict:
    return json.loads(GOLDEN.read_text(encoding="ascii"))


def test_golden_rounds():
    """`python -m tests.rounds` writes them anew"""
    written = golden()
    assert {name: entry["case"] for name, entry in written.items()} == cases()
    for name, entry in written.items():
        assert replay(entry["case"]) == entry["rounds"], name
    rounds = [one for entry in written.values() for one in entry["rounds"]]
    assert {one["stop_reason"] for one in rounds} == {None, "stop", "length", "context"}
    assert {one["drafter"] for one in rounds} == {None, "mtp", "ngram"}


def test_core_is_what_old_android_can_run():
    """No lambda and no method reference, which dx does not compile, and nothing beyond java.*"""
    for path in sorted((CORE / "src").rglob("*.java")):
        source = path.read_text(encoding="utf-8")
        code = re.sub(r"/\*.*?\*/|//[^\n]*|\"(\\.|[^\"\\])*\"", "", source, flags=re.DOTALL)
        assert "->" not in code and "::" not in code, path
        for name in re.findall(r"^import (?:static )?([\w.]+);", source, flags=re.MULTILINE):
            assert name.startswith(("java.", "gemma4.mtp.")), (path, name)
        assert source.count("\n") <= 450 and max(map(len, source.splitlines())) <= 120, path


# The loop


@needs_jdk
@pytest.mark.parametrize("name", cases())
def test_golden_rounds_in_java(jvm, name):
    entry = golden()[name]
    assert jvm.ask("rounds", **entry["case"]) == entry["rounds"]


class Both:
    """One bundle in both languages, with a session in each."""

    def __init__(self, jvm: Jvm, bundle: Path, policy: dict, context: int = CONTEXT, margin: int = MARGIN):
        self.jvm, self.policy = jvm, policy
        drafter = "auto" if policy["draft_tokens"] is None else policy["drafters"][0]
        self.pair = load(bundle, 1, policy["draft_tokens"], policy["schedule"], "onnx", drafter)
        self.opened = jvm.ask("open", bundle=str(bundle), python=sys.executable, policy=policy)
        self.renew(context, margin)

    def renew(self, context: int = CONTEXT, margin: int = MARGIN) -> None:
        self.session = Session(self.pair, context, margin)
        self.number = self.jvm.ask("session", pair=self.opened["pair"], context=context, margin=margin)

    def generate(self, prompt: list[int], count: int, sampling: Sampling = SAMPLED, leave_after: int = 0) -> Reply:
        """What both make of it, after comparing it."""
        theirs = self.java(prompt, count, sampling, leave_after)
        reply = self._python(prompt, Settings(count, sampling), leave_after)
        assert theirs["token_ids"] == list(reply.token_ids)
        assert theirs["stop_reason"] == reply.stop_reason
        assert (theirs["reused_tokens"], theirs["rerun_tokens"]) == (reply.reused_tokens, reply.rerun_tokens)
        if self.policy["draft_tokens"] is not None:
            assert self.counts(theirs) == statistics(reply)
        return reply

    def java(
        self, prompt: list[int], count: int, sampling: Sampling, leave_after: int = 0, break_after: int = 0
    ) -> dict:
        """leave_after, break_after: rounds until somebody stops it, until memory fails; 0 for never."""
        request = {"prompt": prompt, "max_new_tokens": count, "policy": self.policy}
        ends = {"leave_after": leave_after, "break_after": break_after}
        given = {**dataclasses.asdict(sampling), "seed": str(sampling.seed)}
        return self.jvm.ask("generate", session=self.number, sampling=given, **request, **ends)

    def _python(self, prompt: list[int], asked: Settings, leave_after: int) -> Reply:
        generate_rounds = self.session._rounds

        def cancelling(*arguments):
            for number, entry in enumerate(generate_rounds(*arguments), 1):
                if number == leave_after:
                    self.session.cancel()
                yield entry

        self.session._rounds = cancelling
        try:
            return self.session.generate(prompt, asked)
        finally:
            self.session._rounds = generate_rounds

    @staticmethod
    def counts(theirs: dict) -> tuple:
        per_place = list(zip(theirs["drafted_at"], theirs["accepted_at"], strict=True))
        return theirs["rounds"], theirs["drafted"], theirs["accepted"], per_place


def statistics(reply: Reply) -> tuple:
    counts = draft_statistics(reply.rounds)
    per_place = [(place["drafted"], place["accepted"]) for place in counts["per_position"]]
    return len(reply.rounds), counts["drafted"], counts["accepted"], per_place


def tiny_prompts(both: Both, first: int, count: int) -> list[list[int]]:
    written = json.loads((TINY / "prompts.json").read_text(encoding="utf-8"))[first : first + count]
    return [both.pair.text.encode_prompt(prompt["text"]) for prompt in written]


@needs_jdk
@pytest.mark.parametrize("policy", POLICIES)
def test_texts_and_counts(bundle_of, jvm, policy):
    both = Both(jvm, bundle_of("tiny"), POLICIES[policy])
    accepted = 0
    for number, prompt in enumerate(tiny_prompts(both, 0, 4)):
        for sampling in SAMPLINGS.values():
            both.renew()
            reply = both.generate(prompt, 40, dataclasses.replace(sampling, seed=(sampling.seed + number) & WORD))
            accepted += statistics(reply)[2]
    assert accepted > 0 or policy == "plain"


@needs_jdk
@pytest.mark.parametrize(
    ("recipe", "dtype"), [("int8", "float32"), ("int8", "float16"), ("int8", "int8"), ("small", "float32")]
)
def test_turns_windows_chunks_and_endings(bundle_of, jvm, recipe, dtype):
    """The window (32) and the chunk (128) are crossed in prompts and in blocks; turns reuse rows and go back."""
    both = Both(jvm, bundle_of("tiny", recipe, "onnx", dtype), POLICIES["3"], context=400, margin=128)
    long = [token for prompt in tiny_prompts(both, 4, 12) for token in prompt][:122]
    assert len(long) == 122
    first = both.generate(long, 40)
    spoken = [*long, *first.token_ids]
    assert len(long) < 128 < len(spoken), "the chunk ends within the reply"
    text = [*spoken, *range(200, 340)]
    again = both.generate(text, 30, Sampling(), leave_after=4)
    assert again.stop_reason == "cancelled" and again.reused_tokens >= len(spoken) - 1
    back = both.generate([*text[:200], 7, 8], 12)
    assert back.reused_tokens == (200 if dtype == "float32" else 128)
    assert both.generate([*text[:20], 9], 8).rerun_tokens > 0
    assert both.generate(text, 500).stop_reason == "context"
    full = [*text, *range(100, 400)][:400]
    assert both.generate(full, 5).token_ids == ()
    with pytest.raises(Refused, match=r"the prompt has 401 tokens, the context holds 400; shorten the prompt"):
        both.java([*full, 5], 5, Sampling())
    kept = both.generate(full[:200], 4)
    assert kept.stop_reason == "length", "what was refused has changed nothing"
    with pytest.raises(Refused, match="OutOfMemoryError"):
        both.java([*full[:200], 9], 50, Sampling(), break_after=2)
    again = both.java(full[:200], 4, SAMPLED)
    assert again["token_ids"] == list(kept.token_ids) and again["reused_tokens"] == 0, "half-written rows are not used"


@needs_jdk
def test_stop_tokens(bundle_of, jvm):
    both, stopped = Both(jvm, bundle_of("tiny"), POLICIES["3"]), 0
    for seed in range(6):
        both.renew()
        chat = both.pair.text.encode_chat([{"role": "user", "content": f"Good morrow, lord {seed}."}])
        reply = both.generate(chat, 120, dataclasses.replace(SAMPLED, seed=seed))
        if reply.stop_reason == "stop":
            stopped += 1
            more = [*chat, *reply.token_ids, *both.pair.text.encode_chat([{"role": "user", "content": "Nay."}])[1:]]
            assert both.generate(more, 20).reused_tokens == len(chat) + len(reply.token_ids)
    assert stopped >= 2


@needs_jdk
def test_random_pairs_with_a_dense_head_and_two_kv_heads(bundle_of, jvm):
    for shape in (dataclasses.replace(SHAPE, centroids=None), dataclasses.replace(SHAPE, kv_heads=2)):
        both = Both(jvm, bundle_of(shape), POLICIES["3"])
        for seed in range(2):
            both.renew()
            both.generate([2, 40 + seed, 50, 60, 70], 24, dataclasses.replace(SAMPLED, seed=seed))


# Numbers


@needs_jdk
@pytest.mark.parametrize("recipe", ["int8", "small", "fp32"])
def test_rows_of_tables(bundle_of, jvm, recipe):
    bundle = bundle_of("tiny", recipe)
    manifest, ids = contract.load(bundle), [0, 1, 5, 511, 1023]
    tables = {"per_layer": manifest.target.per_layer_table, "token": manifest.backends["onnx"].token_table}
    for name, spec in tables.items():
        rows = np.array(jvm.ask("table", bundle=str(bundle), name=name, ids=ids), np.float32)
        assert rows.tobytes() == EmbeddingTable(bundle, spec).rows(ids).tobytes(), name


@needs_jdk
def test_tables_of_more_bytes_than_a_mapping_holds(jvm, tmp_path):
    """E2B's per-layer table has 2.35 GB; this file has a hole of that size."""
    rows, columns, offset = 2_400_000, 1000, 4096
    with open(tmp_path / "table.bin", "wb") as file:
        file.truncate(offset + rows * columns)
        asked = [0, 1_073_740, 1_073_741, 1_073_742, 2_147_483, 2_147_484, rows - 1]
        for row in asked:
            file.seek(offset + row * columns)
            file.write(bytes([row % 100, 255]) + bytes(columns - 3) + b"\x07")
    spec = {"file": "table.bin", "offset_bytes": offset, "dtype": "int8", "shape": [rows, columns]}
    found = jvm.ask("mapped", folder=str(tmp_path), spec=spec, rows=asked)
    assert [[row[0], row[1], row[-1]] for row in found] == [[row % 100, -1, 7] for row in asked]


@needs_jdk
def test_rotary_rows(jvm):
    frequencies = [float(np.float32(1e6 ** -(i / 64))) for i in range(64)]
    for first in (0, 127, 4096, 131_000):
        rows = jvm.ask("rope", inv_freq=frequencies, first=first, count=3)
        ours = rope_rows({"sliding": frequencies, "full": frequencies}, np.arange(first, first + 3))
        for theirs, name in zip(rows, ("cos_full", "sin_full"), strict=True):
            assert np.array(theirs, np.float32).tobytes() == ours[name].tobytes()


@needs_jdk
@settings(max_examples=100, deadline=None)
@given(
    rows=arrays.arrays(
        np.float32, (3, 2, 4), elements=st.floats(-60_000, 60_000, width=32) | st.floats(-(2**-20), 2**-20, width=32)
    ),
    dtype=st.sampled_from(sorted(KV_PARTS)),
)
def test_rows_of_a_cache(jvm, rows, dtype):
    values = [float(value) for value in rows.ravel()]
    theirs = jvm.ask("encode rows", shape=rows.shape, values=values, dtype=dtype)
    for name, part in zip(KV_PARTS[dtype], kv_rows.encode(rows, rows, dtype), strict=True):
        assert bytes(theirs[name]) == part.tobytes(), name


@needs_jdk
@pytest.mark.parametrize("seed", [0, 1, 12345, 1 << 63, WORD])
def test_random_stream(jvm, seed):
    assert jvm.ask("uniform", seed=str(seed), count=500) == [uniform(seed, position) for position in range(500)]


@needs_jdk
def test_weights_and_draws(jvm):
    """Weights to the last bits of the exponential, tokens to the token."""
    rng = np.random.default_rng(0)
    cases = [random_case(rng) for _ in range(600)]
    asked = [
        {"logits": [float(x) for x in logits], "text": text, "sampling": {**vars(sampling), "seed": str(sampling.seed)}}
        for logits, text, sampling in cases
    ]
    for answer, (logits, text, sampling) in zip(jvm.ask("weigh", cases=asked), cases, strict=True):
        assert answer["token"] == Sampler(sampling)(text, logits)
        if "ids" in answer:
            ids, weights = weigh(logits, sampling)
            assert answer["ids"] == ids.tolist()
            np.testing.assert_allclose(answer["weights"], weights, rtol=1e-15)


def random_case(rng: np.random.Generator) -> tuple[np.ndarray, list[int], Sampling]:
    """Some logits are alike, so that ties meet every filter; some are all negative, which a penalty treats otherwise."""
    size = int(rng.integers(2, 400))
    logits = rng.normal(rng.choice([0, -20]), 4, size).round(int(rng.integers(0, 6))).astype(np.float32)
    text = rng.integers(0, size, int(rng.integers(1, 30))).tolist()
    sampling = Sampling(
        do_sample=bool(rng.random() < 0.9),
        temperature=float(rng.choice([1e-3, 0.3, 1.0, 2.5])),
        top_k=int(rng.choice([0, 1, 5, 64, 300])),
        top_p=float(rng.choice([0.1, 0.5, 0.95, 1.0])),
        min_p=float(rng.choice([0.0, 0.05])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.3])),
        seed=int(rng.integers(0, 1 << 63)),
    )
    return logits, text, sampling


@needs_jdk
def test_no_token_can_be_chosen(jvm):
    case = {"text": [1, 2], "sampling": {**vars(Sampling()), "seed": "0"}, "logits": [float("nan"), 1.0]}
    with pytest.raises(ValueError) as ours:
        Sampler(Sampling())([1, 2], np.array([np.nan, 1], np.float32))
    with pytest.raises(Refused) as theirs:
        jvm.ask("weigh", cases=[case])
    assert str(theirs.value) == str(ours.value)


@needs_jdk
@pytest.mark.parametrize("seed", range(6))
def test_draft_lengths_are_chosen_alike(jvm, seed):
    """The same plans on a machine and a text made of numbers, round by round, and the same reason in the end."""
    rng, costs, plans, steps = random.Random(seed), Costs(), [], []
    slope, chance = rng.choice([0.05, 0.3, 0.9]), rng.choice([0.2, 0.6, 0.95])
    for _ in range(400):
        offers = {"mtp": rng.randint(1, 16), **({"ngram3": rng.randint(1, 16)} if rng.random() < 0.3 else {})}
        hits = {source: sum(rng.random() < chance for _ in range(9)) for source in ("mtp", "ngram3")}
        verify = [(1 + slope * rows) * rng.lognormvariate(0, 0.2) for rows in range(17)]
        steps.append({"offers": offers, "hits": hits, "verify": verify, "draft": 0.05})
        plan = decide(costs, offers)
        plans.append([plan.source, plan.count, plan.probe])
        accepted = min(hits[plan.source], plan.count) if plan.source else 0
        tried = {source: plan.count if source == plan.source else accepted + 1 for source in offers}
        agreed = {
            source: (min(hits[source], tried[source]), min(hits[source] + 1, tried[source]))
            for source in offers
            if source in (plan.source, "ngram3")
        }
        trial = Trial(plan, plan.count, accepted, accepted + 1, 0.05 * plan.count, verify[plan.count], agreed)
        costs = learn(costs, trial)
    assert jvm.ask("costs", steps=steps) == [plans, explain(costs, "mtp")]


@needs_jdk
@pytest.mark.parametrize("dtype", sorted(KV_PARTS))
def test_memory(bundle_of, jvm, dtype):
    bundle = bundle_of("tiny", "int8", "onnx", dtype)
    for context, margin, drafts in ((512, 0, True), (2000, 1024, True), (129, 64, False)):
        ours = needs(contract.load(bundle), "onnx", context, margin, drafts)
        *theirs, resident = jvm.ask("memory", bundle=str(bundle), context=context, margin=margin, drafts=drafts)
        assert theirs == [ours.weights_bytes, ours.drafter_bytes, ours.kv_bytes]
        assert 1e7 < resident < 1e10


@needs_jdk
@pytest.mark.parametrize("name", ["cpu_capacity", "cpufreq/cpuinfo_max_freq", "nothing"])
@pytest.mark.parametrize("speeds", [[1024] * 2, [1024, 1000, 420, 420], [400, 2800, 2800, 3100], [9, 5, 5, 1, 1, 1]])
def test_threads(tmp_path, jvm, name, speeds):
    for number, speed in enumerate(speeds):
        folder = tmp_path / f"cpu{number}"
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(f"{speed}\n")
    expected = len(without_slowest_class(sysfs_speeds(tmp_path, set(range(len(speeds))))))
    assert jvm.ask("threads", sysfs=str(tmp_path)) == expected
    assert jvm.ask("threads", sysfs=str(tmp_path / "nowhere")) == 3
