"""A bundle in memory: target, drafter and text, ready for sessions."""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from . import manifest as contract
from .drafting import DRAFTERS, AutoPolicy, DraftPolicy
from .graph import Wrap, installed, unwrapped
from .memory import give_back
from .models import Drafter, Target, load_drafter, load_target
from .text import Text

PREFERENCE = ("executorch", "onnx")  # verifying a block costs less on ExecuTorch


@dataclass(frozen=True)
class Pair:
    """off_reason: why the bundle's drafter cannot draft, if it was to. load_s: seconds that loading took. lock: for one call at a
    time, as graphs write into buffers of their own."""

    manifest: contract.Manifest
    backend: str
    target: Target
    drafter: Drafter | None
    off_reason: str | None
    policy: DraftPolicy | AutoPolicy
    text: Text
    load_s: float
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)


def load(
    bundle: Path,
    threads: int,
    draft_tokens: int | None = None,
    schedule: str | None = None,
    backend: str = "auto",
    drafter: str = "auto",
    wrap: Wrap = unwrapped,
) -> Pair:
    """ValueError if the bundle does not load. A drafter that is missing or corrupt only turns drafting off.

    drafter: "mtp", "ngram" or "auto", both where the number of drafts is chosen while running. That is so without
    draft_tokens and schedule; with a schedule alone the drafter's own number is used. wrap: what becomes of each graph.
    """
    started = time.perf_counter()
    manifest = contract.load(bundle)
    backend = choose_backend(manifest, backend)
    target = load_target(bundle, manifest, backend, threads, wrap)
    policy, loaded, off_reason = choose_policy(manifest.drafter, draft_tokens, schedule, drafter), None, None
    if draft_tokens == 0:
        off_reason = "draft tokens set to 0"
    elif "mtp" in policy.drafters:
        try:
            loaded = load_drafter(bundle, manifest, target, backend, threads, wrap)
        except (ValueError, OSError) as error:
            policy, off_reason = DraftPolicy(0), str(error)
    text = Text(bundle, manifest)
    give_back()
    return Pair(manifest, backend, target, loaded, off_reason, policy, text, time.perf_counter() - started)


def choose_backend(manifest: contract.Manifest, wanted: str) -> str:
    """wanted, or for "auto" the first of PREFERENCE that the bundle holds and whose package is installed."""
    held = manifest.backends
    if wanted == "auto":
        return next((name for name in PREFERENCE if name in held and installed(name)), next(iter(held)))
    if wanted not in held:
        raise ValueError(f"the bundle has files for {', '.join(held)}, not for {wanted}; export it with --backend all")
    return wanted


def choose_policy(
    spec: contract.DrafterSpec, draft_tokens: int | None, schedule: str | None, drafter: str
) -> DraftPolicy | AutoPolicy:
    """As `load` describes it."""
    drafters = DRAFTERS if drafter == "auto" else (drafter,)
    if draft_tokens is None and schedule is None:
        return AutoPolicy(drafters)
    return DraftPolicy(
        spec.num_draft_tokens if draft_tokens is None else draft_tokens, schedule or spec.schedule, drafters[:1]
    )
