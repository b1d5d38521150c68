"""Whether a bundle fits into memory, told before it is loaded, and what is given back. All sizes are bytes."""

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path

from .manifest import DTYPES, FULL, SLIDING, KVSpec, Manifest

MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Needs:
    """weights: of the target's graphs; kv: of context_tokens, with what a step casts. Embedding tables are left out: they
    are mapped, and only rows in use become resident."""

    weights_bytes: int
    drafter_bytes: int
    kv_bytes: int
    context_tokens: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.drafter_bytes + self.kv_bytes


def needs(manifest: Manifest, backend: str, context_tokens: int, margin_rows: int, drafts: bool) -> Needs:
    """context_tokens, margin_rows as for KVCache; drafts: whether the bundle's drafter is loaded."""
    loaded = manifest.backends[backend].loaded_bytes
    target, drafter = loaded["self_decoder"] + loaded["cross_decoder"], loaded["drafter"]
    if head := manifest.drafter.centroid_head:
        drafter += head.centroids.size_bytes
    kv_bytes = cache_bytes(manifest.kv, context_tokens, margin_rows) + cast_bytes(manifest.kv, context_tokens)
    return Needs(target, drafter if drafts else 0, kv_bytes, context_tokens)


def together(parts: list[Needs]) -> Needs:
    """Of bundles that are loaded at once."""
    sizes = zip(*((part.weights_bytes, part.drafter_bytes, part.kv_bytes) for part in parts), strict=True)
    return Needs(*map(sum, sizes), max(part.context_tokens for part in parts))


def cache_bytes(spec: KVSpec, context_tokens: int, margin_rows: int) -> int:
    """Keys and values of a KVCache whose context is full."""
    whole_chunks = -(-context_tokens // spec.chunk_rows) * spec.chunk_rows
    closed = spec.window + margin_rows if margin_rows else 0
    rows = {FULL: whole_chunks, SLIDING: spec.window + closed}
    total = 0
    for layer in spec.layers:
        donor_ring = spec.window if layer.layer == spec.donors[SLIDING] else 0
        total += spec.row_bytes(layer) * (rows[layer.type] + donor_ring)
        if layer.type == SLIDING or spec.dtype != "float32":  # else the open chunk lies among the rows of all positions
            total += 2 * DTYPES["float32"] * layer.kv_heads * layer.head_dim * spec.chunk_rows
    return total


def cast_bytes(spec: KVSpec, context_tokens: int) -> int:
    """What a step takes for past rows narrower than float32: keys and values of one full layer at a time, cast."""
    if spec.dtype == "float32":
        return 0
    return max(2 * DTYPES["float32"] * x.kv_heads * x.head_dim for x in spec.layers if x.type == FULL) * context_tokens


def available_bytes(meminfo: Path = MEMINFO) -> int | None:
    """What programs can have without swapping; None where the system does not tell."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def check_fits(need: Needs, available: int | None) -> None:
    """ValueError with both numbers and the remedy where it does not fit; available None: not known, nothing is said."""
    if available is None or need.total_bytes <= available:
        return
    parts = {"weights": need.weights_bytes, "drafter": need.drafter_bytes, "KV": need.kv_bytes}
    told = " + ".join(f"{name} {size / 1e6:.1f} MB" for name, size in parts.items() if size)
    raise ValueError(
        f"{told} ({need.context_tokens} tokens) against {available / 1e6:.1f} MB available: close other programs, give a "
        "smaller --context, or run it all the same with --force (weights are mapped and can be paged, which is slow)"
    )


def give_back() -> None:
    """Free memory of the process to the system. glibc keeps it: 180 MB after Gemma's tokenizer was read, 120 MB of the work
    space of a long prompt. Elsewhere nothing is done."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
