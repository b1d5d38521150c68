"""A loaded bundle and one generation with its measurements: what the command line and a program call."""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from . import manifest as contract
from .drafting import DRAFTERS, AutoPolicy, DraftPolicy
from .graph import installed
from .models import Drafter, Target, load_drafter, load_target
from .sampling import GREEDY, LogitsHook, Sampling
from .speculative import Round, generate
from .text import Text, TextStream

PREFERENCE = ("executorch", "onnx")  # verifying a block costs less on ExecuTorch


@dataclass(frozen=True)
class Pair:
    """off_reason: why the bundle's drafter cannot draft, if it was to. load_s: seconds that loading took."""

    manifest: contract.Manifest
    backend: str
    target: Target
    drafter: Drafter | None
    off_reason: str | None
    policy: DraftPolicy | AutoPolicy
    text: Text
    load_s: float


def load(
    bundle: Path,
    threads: int,
    draft_tokens: int | None = None,
    schedule: str | None = None,
    backend: str = "auto",
    drafter: str = "auto",
) -> Pair:
    """ValueError if the bundle does not load. A drafter that is missing or corrupt only turns drafting off.

    drafter: "mtp", "ngram" or "auto", both where the number of drafts is chosen while running. That is so without
    draft_tokens and schedule; with a schedule alone the drafter's own number is used.
    """
    started = time.perf_counter()
    manifest = contract.load(bundle)
    backend = choose_backend(manifest, backend)
    target = load_target(bundle, manifest, backend, threads)
    policy, loaded, off_reason = _policy(manifest.drafter, draft_tokens, schedule, drafter), None, None
    if draft_tokens == 0:
        off_reason = "draft tokens set to 0"
    elif "mtp" in policy.drafters:
        try:
            loaded = load_drafter(bundle, manifest, target, backend, threads)
        except (ValueError, OSError) as error:
            policy, off_reason = DraftPolicy(0), str(error)
    text = Text(bundle, manifest)
    return Pair(manifest, backend, target, loaded, off_reason, policy, text, time.perf_counter() - started)


def choose_backend(manifest: contract.Manifest, wanted: str) -> str:
    """wanted, or for "auto" the first of PREFERENCE that the bundle holds and whose package is installed."""
    held = manifest.backends
    if wanted == "auto":
        return next((name for name in PREFERENCE if name in held and installed(name)), next(iter(held)))
    if wanted not in held:
        raise ValueError(f"the bundle has files for {', '.join(held)}, not for {wanted}; export it with --backend all")
    return wanted


def _policy(
    spec: contract.DrafterSpec, draft_tokens: int | None, schedule: str | None, drafter: str
) -> DraftPolicy | AutoPolicy:
    drafters = DRAFTERS if drafter == "auto" else (drafter,)
    if draft_tokens is None and schedule is None:
        return AutoPolicy(drafters)
    return DraftPolicy(
        spec.num_draft_tokens if draft_tokens is None else draft_tokens, schedule or spec.schedule, drafters[:1]
    )


def generate_text(
    pair: Pair,
    prompt_ids: list[int],
    max_new_tokens: int,
    show: Callable[[str], None],
    sampling: Sampling = GREEDY,
    hook: LogitsHook | None = None,
) -> dict:
    """Text after prompt_ids; `show` gets each piece of it as it comes. -> text, ids, settings and measurements."""
    stream, ids, rounds, parts = TextStream(pair.text), list(prompt_ids), [], []
    cache = pair.target.new_cache()
    started = time.perf_counter()
    first = started
    request = (pair.target, pair.drafter, cache, ids, max_new_tokens, pair.manifest.tokens, pair.policy)
    for entry in generate(*request, sampling, hook):
        if not rounds:
            first = time.perf_counter()
        rounds.append(entry)
        parts.append(stream.push(entry.tokens))
        show(parts[-1])
    ended = time.perf_counter()
    parts.append(stream.flush())
    show(parts[-1])
    token_ids = ids[len(prompt_ids) :]
    decode_s = ended - first
    return {
        "text": "".join(parts),
        "prompt_ids": list(prompt_ids),
        "token_ids": token_ids,
        "stop_reason": rounds[-1].stop_reason,
        "backend": pair.backend,
        "timings": {
            "load_s": pair.load_s,
            "prefill_tokens": len(prompt_ids),
            "prefill_s": first - started,
            "time_to_first_token_s": first - started,
            "decode_s": decode_s,
            "decode_tokens_per_second": (len(token_ids) - 1) / decode_s if len(token_ids) > 1 else None,
        },
        "sampling": {**asdict(sampling), "seed": None if sampling.greedy else sampling.seed},
        "draft": {**draft_statistics(rounds), **_draft_settings(pair)},
        "memory": {"peak_rss_mib": peak_rss_mib()},
    }


def _draft_settings(pair: Pair) -> dict:
    policy = pair.policy
    fixed = isinstance(policy, DraftPolicy)
    return {
        "draft_tokens": policy.num_tokens if fixed else "auto",
        "schedule": policy.schedule if fixed else None,
        "drafters": list(policy.drafters),
        "off_reason": pair.off_reason or (None if fixed else policy.off_reason()),
    }


def draft_statistics(rounds: list[Round]) -> dict:
    """Counts over the rounds that verified a block; per_position[i] counts the drafts at place i of their block."""
    blocks = [entry for entry in rounds if entry.drafted]
    places = range(max((entry.drafted for entry in blocks), default=0))
    return {
        "rounds": len(blocks),
        "drafted": sum(entry.drafted for entry in blocks),
        "accepted": sum(entry.accepted for entry in blocks),
        "per_position": [
            {
                "drafted": sum(entry.drafted > i for entry in blocks),
                "accepted": sum(entry.accepted > i for entry in blocks),
            }
            for i in places
        ],
        "per_drafter": {
            name: {
                "rounds": sum(entry.drafter == name for entry in blocks),
                "drafted": sum(entry.drafted for entry in blocks if entry.drafter == name),
                "accepted": sum(entry.accepted for entry in blocks if entry.drafter == name),
            }
            for name in DRAFTERS
        },
    }


def peak_rss_mib() -> float:
    """Of this process so far. Linux: VmHWM, for ru_maxrss begins with the peak of the process that started this one."""
    status = Path("/proc/self/status")
    peaks = [line.split()[1] for line in status.read_text().splitlines() if "VmHWM" in line] if status.exists() else []
    if peaks:
        return int(peaks[0]) / (1 << 10)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)  # macOS counts bytes
