"""What a reply took: counts of drafts, times, memory; the JSON object of the command line."""

import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .drafting import DRAFTERS, AutoPolicy, DraftPolicy
from .session import Reply, Session
from .speculative import Round


def report(session: Session, reply: Reply) -> dict:
    """Text, ids, settings and measurements of a session's reply."""
    pair, sampling = session.pair, reply.sampling
    return {
        "text": reply.text,
        "prompt_ids": list(reply.prompt_ids),
        "token_ids": list(reply.token_ids),
        "stop_reason": reply.stop_reason,
        "backend": pair.backend,
        "timings": {
            "load_s": pair.load_s,
            "prefill_tokens": len(reply.prompt_ids) - reply.reused_tokens,
            "prefill_s": reply.prefill_s,
            "time_to_first_token_s": reply.prefill_s,
            "decode_s": reply.decode_s,
            "decode_tokens_per_second": reply.decode_tokens_per_second,
        },
        "sampling": {**asdict(sampling), "seed": None if sampling.greedy else sampling.seed},
        "draft": {**draft_statistics(reply.rounds), **_draft_settings(session.policy, pair.off_reason)},
        "memory": {"peak_rss_mib": peak_rss_mib()},
    }


def _draft_settings(policy: DraftPolicy | AutoPolicy, off_reason: str | None) -> dict:
    fixed = isinstance(policy, DraftPolicy)
    return {
        "draft_tokens": policy.num_tokens if fixed else "auto",
        "schedule": policy.schedule if fixed else None,
        "drafters": list(policy.drafters),
        "off_reason": off_reason or (None if fixed else policy.off_reason()),
    }


def draft_statistics(rounds: Sequence[Round]) -> dict:
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
