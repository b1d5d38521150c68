"""What benchmarks.against_llama_cpp measured, as lines of text."""

import statistics
from dataclasses import dataclass

from benchmarks.our_engine import DRAFTS
from benchmarks.turns import Loaded, Memory

LLAMA = "llama.cpp"
WIDTH = 34


@dataclass(frozen=True)
class Spread:
    """Of measurements: the median, the lowest and the highest."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Measured:
    """Of one engine. seconds: call -> of each round. rounds_s: of a round of DRAFTS drafts in each run, empty where none
    was asked for."""

    loaded: tuple[Loaded, ...]
    memory: Memory
    seconds: dict[str, list[float]]
    rounds_s: list[float]
    file_bytes: int


def spread(values: list[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def ratios(one: list[float], other: list[float]) -> Spread:
    """one / other, round by round"""
    return spread([a / b for a, b in zip(one, other, strict=True)])


def lines(found: dict[str, Measured]) -> list[str]:
    """A table of each call; of each engine its calls in decodes, files, loading and memory; llama.cpp to each of ours: over 1,
    ours is faster or smaller."""
    ours = {name: one for name, one in found.items() if name != LLAMA}
    return [
        *_table(found),
        *(f"{name}, in its own decodes: {_in_decodes(one)}" for name, one in found.items()),
        *(f"{name}: {_sizes(one)}" for name, one in found.items()),
        *(f"{LLAMA} / {name}: {_compared(found[LLAMA], one)}" for name, one in ours.items()),
    ]


def _table(found: dict[str, Measured]) -> list[str]:
    rows = [{**one.seconds, f"draft {DRAFTS}": one.rounds_s} for one in found.values()]
    table = [" " * 12 + "".join(f"  {name:>{WIDTH}}" for name in found)]
    for call in rows[0]:
        if rows[0][call]:
            table.append(f"{call:12}" + "".join(f"  {_ms(row[call]):>{WIDTH}}" for row in rows))
    return table


def _ms(values: list[float]) -> str:
    found = spread([1e3 * value for value in values])
    return f"{found.median:.1f} ({found.low:.1f} to {found.high:.1f}) ms"


def _in_decodes(one: Measured) -> str:
    decode = one.seconds["decode"]
    parts = [f"{call} {ratios(values, decode)}" for call, values in one.seconds.items() if call.startswith("verify")]
    if one.rounds_s:  # in runs of their own, so by the median
        parts.append(f"draft {DRAFTS} {spread([value / statistics.median(decode) for value in one.rounds_s])}")
    return ", ".join(parts)


def _sizes(one: Measured) -> str:
    load, first = (spread([getattr(entry, name) for entry in one.loaded]) for name in ("load_s", "first_token_s"))
    memory = one.memory
    return (
        f"files {one.file_bytes / 1e6:.0f} MB, load {load} s, with a first token {first} s; memory peak "
        f"{memory.peak / 1e6:.0f} MB, now {memory.own / 1e6:.0f} own and {memory.mapped / 1e6:.0f} mapped"
    )


def _compared(llama: Measured, one: Measured) -> str:
    parts = [f"{call} {ratios(values, one.seconds[call])}" for call, values in llama.seconds.items()]
    if llama.rounds_s:
        parts.append(f"draft {DRAFTS} {ratios(llama.rounds_s, one.rounds_s)}")
    first = ratios(*([entry.first_token_s for entry in both.loaded] for both in (llama, one)))
    parts.append(f"first token {first}, peak memory {llama.memory.peak / one.memory.peak:.2f}")
    return ", ".join([*parts, f"files {llama.file_bytes / one.file_bytes:.2f}"])
