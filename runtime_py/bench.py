"""python -m runtime_py bench: how fast a bundle is with each number of drafts, on prompts of several kinds.

All numbers of drafts (modes) take turns on every prompt, in another order each time, so that a machine that gets slower
or busy slows all of them; the whole is repeated, and the spread over the repeats is told with the median.
"""

import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import probe
from .bench_prompts import Prompt
from .costs import FIRST_CHANCE
from .drafting import AutoPolicy, DraftPolicy
from .graph import Graph
from .loading import Pair, choose_policy
from .manifest import Manifest
from .measure import draft_statistics, peak_rss_mib
from .memory import needs
from .probe import BUSY_NOTE
from .sampling import GREEDY
from .session import Session, Settings
from .speculative import Round
from .text import TEMPLATE

WARM_UP_TOKENS = 8
LEAST_DRAFTED = 10  # drafts of a position whose acceptance is shown
AUTO = "auto"
Mode = int | str  # draft tokens, or AUTO
Clock = Callable[[], float]


@dataclass(frozen=True)
class Plan:
    """What is run. modes: numbers of draft tokens, or AUTO; drafter as on the command line; context None: the bundle's."""

    prompts: tuple[Prompt, ...]
    modes: tuple[Mode, ...]
    repeats: int
    tokens: int
    drafter: str
    context_tokens: int | None = None


@dataclass(frozen=True)
class Run:
    """One reply. target_s, drafter_s: in the graphs, of its prefill and decode."""

    mode: Mode
    prompt: int
    repeat: int
    prompt_tokens: int
    token_ids: tuple[int, ...]
    prefill_s: float
    decode_s: float
    target_s: float
    drafter_s: float
    rounds: tuple[Round, ...]


class GraphTimer:
    """Seconds spent in the graphs of target and drafter since the last `take`."""

    def __init__(self, clock: Clock = time.perf_counter):
        self._clock, self._seconds = clock, {"target": 0.0, "drafter": 0.0}

    def wrap(self, name: str, graph: Graph) -> Graph:
        """As graph.Wrap."""
        who = "drafter" if name == "drafter" else "target"

        def timed(feeds):
            started = self._clock()
            try:
                return graph(feeds)
            finally:
                self._seconds[who] += self._clock() - started

        return timed

    def take(self) -> tuple[float, float]:
        """-> target's, drafter's; both begin anew."""
        taken = self._seconds["target"], self._seconds["drafter"]
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return taken


def measure(
    pair: Pair, timer: GraphTimer, plan: Plan, threads: int, thread_candidates: list[dict], say: Callable[[str], None]
) -> dict:
    """All that the reports tell. pair: loaded with timer.wrap; thread_candidates: as bench_threads.time_threads gives."""
    session = Session(pair, plan.context_tokens, margin_rows=0)
    prompts = encode(pair, plan.prompts, session.max_context_tokens, plan.tokens)
    modes = (0,) if pair.off_reason else plan.modes
    say("costs of a verify and a draft")
    costs = probe.as_json(probe.probe(pair.target, pair.drafter, plan.context_tokens), pair.off_reason)
    runs, off_reasons = run_all(session, timer, prompts, modes, plan.repeats, plan.tokens, plan.drafter, say)
    kinds = [prompt.kind for prompt in plan.prompts]
    lengths = [len(ids) for ids in prompts]
    summaries = summarize(runs, modes, kinds)
    longest = max(run.prompt_tokens + len(run.token_ids) for run in runs)
    return {
        "bundle": pair.manifest.name,
        "recipe": pair.manifest.backends[pair.backend].quantization.title,
        "kv_dtype": pair.manifest.kv.dtype,
        "backend": pair.backend,
        "threads": threads,
        "thread_candidates": thread_candidates,
        "machine": machine(),
        "load_s": pair.load_s,
        "repeats": plan.repeats,
        "tokens": plan.tokens,
        "prompt_count": len(prompts),
        "prompt_tokens": [min(lengths), max(lengths)],
        "prompts_by_kind": {kind: kinds.count(kind) for kind in kinds},
        "modes": summaries,
        "auto_off_reasons": off_reasons,
        "off_reason": pair.off_reason,
        "differing_texts": (differing := differing_texts(runs)),
        "memory": memory_of(pair.manifest, pair.backend, longest),
        "probe": costs,
        "notes": notes(
            summaries, plan.repeats, pair.off_reason, off_reasons, differing, costs["busy"], thread_candidates
        ),
    }


def notes(
    summaries: Sequence[dict],
    repeats: int,
    off_reason: str | None,
    auto_off_reasons: Sequence[str],
    differing: int,
    busy: bool,
    thread_candidates: Sequence[dict],
) -> list[str]:
    """What a reader must know to believe the numbers."""
    modes = {entry["draft_tokens"]: entry for entry in summaries}
    by = modes[AUTO]["per_drafter"] if AUTO in modes else {}
    gains = {mode: entry["speedup"]["median"] for mode, entry in modes.items() if entry["speedup"]}
    best = max(gains, key=gains.__getitem__) if 0 in modes and len(gains) > 1 else None
    told = {
        f"drafting is off: {off_reason}": off_reason,
        f"auto drafted nothing of the bundle's drafter at the end of {len(auto_off_reasons)} of {repeats} repeats: "
        + "; ".join(auto_off_reasons[-1:]): auto_off_reasons,
        "the text is the same with every number of drafts": not differing and len(modes) > 1,
        f"{differing} prompts have other texts with other numbers of drafts; speeds compare unlike texts": differing,
        f"fastest on these prompts: draft tokens {best}, {gains.get(best, 1):.2f} of plain decoding; the verdict above is a "
        f"forecast from single calls, at an acceptance of {FIRST_CHANCE:.2f}": best is not None,
        f"{WARM_UP_TOKENS} tokens with every number of drafts warm up and are not counted": True,
        "x plain is the median over the repeats of the speed against 0 draft tokens in the same repeat": 0 in modes,
        "auto learns anew in every repeat, through all its prompts; it had "
        + " and ".join(
            f"{count['accepted']} of {count['drafted']} drafts by {name} accepted" for name, count in by.items()
        ): by,
        f"acceptance is shown for positions drafted at least {LEAST_DRAFTED} times": any(
            entry["drafted"] for entry in summaries
        ),
        "first token ms is over all prompts and repeats": True,
        "target and drafter are the time in their graphs, host all else: embedding rows, masks, the drafter's head, "
        "sampling, the cache; prefill and decode together": True,
        "threads tried: "
        + ", ".join(f"{entry['threads']} ({entry['decode_s'] * 1e3:.3f} ms a token)" for entry in thread_candidates)
        + "; the fastest was taken": thread_candidates,
        BUSY_NOTE.removeprefix("note: "): busy,
    }
    return [note for note, holds in told.items() if holds]


def encode(pair: Pair, prompts: Sequence[Prompt], max_context_tokens: int, tokens: int) -> list[list[int]]:
    """Ids of the prompts, through the chat template where there is one. ValueError names one that leaves no room."""
    chat = TEMPLATE in pair.manifest.files
    found = []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt.text}]
        ids = pair.text.encode_chat(messages) if chat else pair.text.encode_prompt(prompt.text)
        if len(ids) + tokens > max_context_tokens:
            raise ValueError(
                f"the {prompt.kind} prompt has {len(ids)} tokens and {tokens} are to follow, the context holds "
                f"{max_context_tokens}; give fewer --tokens or shorter prompts"
            )
        found.append(ids)
    return found


def run_all(
    session: Session,
    timer: GraphTimer,
    prompts: Sequence[list[int]],
    modes: Sequence[Mode],
    repeats: int,
    tokens: int,
    drafter: str,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[list[Run], list[str]]:
    """-> all runs but the warm-up, and why auto drafted nothing of the bundle's drafter at the end of a repeat."""
    for mode in modes:
        session.policy = policy_of(session.pair, mode, drafter)
        _run(session, timer, mode, 0, prompts[0], -1, min(tokens, WARM_UP_TOKENS))
    runs, off_reasons = [], []
    for repeat in range(repeats):
        say(f"repeat {repeat + 1} of {repeats}")
        policies = {mode: policy_of(session.pair, mode, drafter) for mode in modes}  # auto learns anew
        for i, ids in enumerate(prompts):
            for mode in rotated(modes, repeat + i):
                session.policy = policies[mode]
                runs.append(_run(session, timer, mode, i, ids, repeat, tokens))
        last = policies.get(AUTO)
        if isinstance(last, AutoPolicy) and (reason := last.off_reason()):
            off_reasons.append(reason)
    return runs, off_reasons


def rotated(modes: Sequence[Mode], turn: int) -> list[Mode]:
    turn %= len(modes)
    return [*modes[turn:], *modes[:turn]]


def policy_of(pair: Pair, mode: Mode, drafter: str) -> DraftPolicy | AutoPolicy:
    count, schedule = (None, None) if mode == AUTO else (mode, "constant")
    return choose_policy(pair.manifest.drafter, count, schedule, drafter)


def _run(session: Session, timer: GraphTimer, mode: Mode, prompt: int, ids: list[int], repeat: int, tokens: int) -> Run:
    session.rewind(0)
    timer.take()
    reply = session.generate(ids, Settings(tokens, GREEDY))
    target_s, drafter_s = timer.take()
    times = (reply.prefill_s, reply.decode_s, target_s, drafter_s)
    return Run(mode, prompt, repeat, len(ids), reply.token_ids, *times, reply.rounds)


def summarize(runs: Sequence[Run], modes: Sequence[Mode], kinds: Sequence[str]) -> list[dict]:
    """What each mode did. Rates of a repeat are sums over its prompts; kinds: of the prompts."""
    plain = _by_repeat([run for run in runs if run.mode == 0], decode_rate)
    return [_summary(mode, [run for run in runs if run.mode == mode], plain, kinds) for mode in modes]


def _summary(mode: Mode, runs: Sequence[Run], plain: Sequence[float | None], kinds: Sequence[str]) -> dict:
    rates = _by_repeat(runs, decode_rate)
    ratios = [rate / other for rate, other in zip(rates, plain, strict=False) if rate and other]
    rounds = [entry for run in runs for entry in run.rounds]
    later = [entry for run in runs for entry in run.rounds[1:]]  # the first is the prefill's
    total_s = sum(run.prefill_s + run.decode_s for run in runs)
    share = {"target": sum(run.target_s for run in runs), "drafter": sum(run.drafter_s for run in runs)}
    share = {who: seconds / total_s for who, seconds in share.items()}
    drafts = draft_statistics(rounds)
    return {
        "draft_tokens": mode,
        "decode_tokens_per_second": spread(rates),
        "speedup": spread(ratios),
        "prefill_tokens_per_second": spread(_by_repeat(runs, prefill_rate)),
        "time_to_first_token_s": spread(run.prefill_s for run in runs),
        "tokens_per_round": sum(len(entry.tokens) for entry in later) / len(later) if later else None,
        "drafted": drafts["drafted"],
        "accepted": drafts["accepted"],
        "acceptance_per_position": [
            {**place, "share": place["accepted"] / place["drafted"]} for place in drafts["per_position"]
        ],
        "per_drafter": drafts["per_drafter"],
        "time_share": {**share, "host": 1 - sum(share.values())},
        "kinds": {kind: _of_kind(runs, kinds, kind) for kind in dict.fromkeys(kinds)},
    }


def _of_kind(runs: Sequence[Run], kinds: Sequence[str], kind: str) -> dict:
    runs = [run for run in runs if kinds[run.prompt] == kind]
    drafts = draft_statistics([entry for run in runs for entry in run.rounds])
    return {
        "decode_tokens_per_second": spread(_by_repeat(runs, decode_rate)),
        "acceptance": drafts["accepted"] / drafts["drafted"] if drafts["drafted"] else None,
    }


def _by_repeat(runs: Sequence[Run], rate: Callable[[Sequence[Run]], float | None]) -> list[float | None]:
    repeats = sorted({run.repeat for run in runs})
    return [rate([run for run in runs if run.repeat == repeat]) for repeat in repeats]


def decode_rate(runs: Sequence[Run]) -> float | None:
    """Tokens per second after the first; None where no text has a second."""
    tokens, seconds = sum(len(run.token_ids) - 1 for run in runs), sum(run.decode_s for run in runs)
    return tokens / seconds if tokens else None


def prefill_rate(runs: Sequence[Run]) -> float:
    return sum(run.prompt_tokens for run in runs) / sum(run.prefill_s for run in runs)


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median, lowest and highest of those that are known."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "lowest": min(known), "highest": max(known)}


def differing_texts(runs: Sequence[Run]) -> int:
    """Prompts whose text is not the same in all modes and repeats."""
    texts: dict[int, set[tuple[int, ...]]] = {}
    for run in runs:
        texts.setdefault(run.prompt, set()).add(run.token_ids)
    return sum(len(found) > 1 for found in texts.values())


def memory_of(manifest: Manifest, backend: str, context_tokens: int) -> dict:
    """Bytes of the files, and of what was held; the peak is that of the process so far, all modes together."""
    need = needs(manifest, backend, context_tokens, 0, True)
    return {
        "peak_rss_mib": peak_rss_mib(),
        "bundle_bytes": sum(spec.size_bytes for spec in manifest.files.values()),
        "weights_bytes": need.weights_bytes,
        "drafter_bytes": need.drafter_bytes,
        "tables_bytes": manifest.memory.tables_bytes,
        "kv_bytes": need.kv_bytes,
        "context_tokens": context_tokens,
    }


def machine() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "hardware"))]
    return {"system": f"{platform.system()} {platform.machine()}", "cpu": models[0] if models else platform.processor()}
