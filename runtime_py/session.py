"""A loaded bundle and one generation with its measurements: what the command line and a program call."""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import manifest as contract
from .graph import installed
from .models import Drafter, Target, load_drafter, load_target
from .speculative import DraftPolicy, Round, generate
from .text import Text, TextStream

PREFERENCE = ("executorch", "onnx")  # verifying a block costs less on ExecuTorch


@dataclass(frozen=True)
class Pair:
    """drafter None: plain decoding, and off_reason says why. load_s: seconds that loading took."""

    manifest: contract.Manifest
    backend: str
    target: Target
    drafter: Drafter | None
    off_reason: str | None
    policy: DraftPolicy
    text: Text
    load_s: float


def load(
    bundle: Path, threads: int, draft_tokens: int | None = None, schedule: str | None = None, backend: str = "auto"
) -> Pair:
    """ValueError if the bundle does not load. A drafter that is missing or corrupt only turns drafting off."""
    started = time.perf_counter()
    manifest = contract.load(bundle)
    backend = choose_backend(manifest, backend)
    target = load_target(bundle, manifest, backend, threads)
    policy = DraftPolicy(
        manifest.drafter.num_draft_tokens if draft_tokens is None else draft_tokens,
        schedule or manifest.drafter.schedule,
    )
    drafter, off_reason = None, "draft tokens set to 0"
    if policy.num_tokens:
        try:
            drafter, off_reason = load_drafter(bundle, manifest, target, backend, threads), None
        except (ValueError, OSError) as error:
            off_reason = str(error)
    text = Text(bundle, manifest)
    return Pair(manifest, backend, target, drafter, off_reason, policy, text, time.perf_counter() - started)


def choose_backend(manifest: contract.Manifest, wanted: str) -> str:
    """wanted, or for "auto" the first of PREFERENCE that the bundle holds and whose package is installed."""
    held = manifest.backends
    if wanted == "auto":
        return next((name for name in PREFERENCE if name in held and installed(name)), next(iter(held)))
    if wanted not in held:
        raise ValueError(f"the bundle has files for {', '.join(held)}, not for {wanted}; export it with --backend all")
    return wanted


def generate_text(pair: Pair, prompt_ids: list[int], max_new_tokens: int, show: Callable[[str], None]) -> dict:
    """Greedy text after prompt_ids; `show` gets each piece of it as it comes. -> text, ids and measurements."""
    stream, ids, rounds, parts = TextStream(pair.text), list(prompt_ids), [], []
    cache = pair.target.new_cache()
    started = time.perf_counter()
    first = started
    for entry in generate(pair.target, pair.drafter, cache, ids, max_new_tokens, pair.manifest.tokens, pair.policy):
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
        "draft": {**draft_statistics(rounds), "off_reason": pair.off_reason},
        "memory": {"peak_rss_mib": peak_rss_mib()},
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
    }


def peak_rss_mib() -> float:
    """Of this process so far. Linux: VmHWM, for ru_maxrss begins with the peak of the process that started this one."""
    status = Path("/proc/self/status")
    peaks = [line.split()[1] for line in status.read_text().splitlines() if "VmHWM" in line] if status.exists() else []
    if peaks:
        return int(peaks[0]) / (1 << 10)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)  # macOS counts bytes
