"""What the calls of a bundle cost: python -m benchmarks.decode BUNDLE. All of a table comes from one run, in turns.

A round times every call once, on every backend of the bundle; the table shows medians over the rounds and how far the
middle half of them spreads. The keys and values of the context are random: no time depends on them.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.arguments import number, numbers
from benchmarks.ids import ROWS, random_ids
from runtime_py import manifest as contract
from runtime_py.bench import GraphTimer
from runtime_py.cache import KVCache
from runtime_py.cpus import default_threads
from runtime_py.files import graph_files
from runtime_py.graph import installed
from runtime_py.manifest import Manifest
from runtime_py.models import Drafter, Target, load_drafter, load_target
from runtime_py.speculative import prefill_chunks

STREAM_BYTES = 1 << 29
BUSY_SPREAD = 0.2  # as `spread` gives it


@dataclass(frozen=True)
class Models:
    """A backend of the bundle. weight_bytes: what one step of the target reads, the files of its two graphs."""

    target: Target
    drafter: Drafter
    timer: GraphTimer
    weight_bytes: int


def load_models(bundle: Path, manifest: Manifest, backend: str, threads: int) -> Models:
    timer = GraphTimer()
    target = load_target(bundle, manifest, backend, threads, timer.wrap)
    drafter = load_drafter(bundle, manifest, target, backend, threads, timer.wrap)
    files = {file for name in ("self_decoder", "cross_decoder") for file in graph_files(manifest, name, backend)}
    weight_bytes = sum(manifest.files[file].size_bytes for file in files)
    return Models(target, drafter, timer, weight_bytes)


def filled_cache(target: Target, manifest: Manifest, length: int) -> KVCache:
    """A cache of random rows."""
    cache, random = target.new_cache(length + contract.CHUNK_ROWS), np.random.default_rng(0)
    while cache.length < length:
        rows = min(cache.room, length - cache.length)
        k, v = (
            [random.normal(0, 1, (rows, x.kv_heads, x.head_dim)).astype(np.float32) for x in manifest.kv.layers]
            for _ in "kv"
        )
        cache.commit(k, v, rows)
    return cache


def calls(models: Models, manifest: Manifest, context: int, prefills: list[int]) -> dict[str, Callable[[], object]]:
    """name -> one call at a context"""
    target, drafter = models.target, models.drafter
    cache, ids = filled_cache(target, manifest, context), random_ids(target.spec.vocab_size, max([ROWS[-1], *prefills]))
    state = np.random.default_rng(2).normal(0, 1, (1, target.spec.hidden_size)).astype(np.float32)

    def verify(rows: int) -> Callable[[], object]:
        return lambda: target.forward(cache, ids[:rows])

    def prefill(tokens: int) -> Callable[[], object]:
        def run() -> None:
            fresh = target.new_cache(tokens)
            for _ in prefill_chunks(target, fresh, ids[:tokens]):
                pass
            target.forward(fresh, ids[fresh.length : tokens], last_row_only=True)

        return run

    found = {("decode" if rows == 1 else f"verify {rows}"): verify(rows) for rows in ROWS}
    found["draft step"] = lambda: drafter.step(drafter.block_inputs(cache), ids[0], state)
    return found | {f"prefill {tokens}": prefill(tokens) for tokens in prefills}


def fitting(contexts: list[int], longest: int) -> list[int]:
    """The contexts behind which a call of CHUNK_ROWS tokens still has room; stderr tells of the others."""
    for context in contexts:
        if context + contract.CHUNK_ROWS > longest:
            print(
                f"context {context}: left out, with the {contract.CHUNK_ROWS} tokens of a call it is longer than the "
                f"{longest} that the bundle's files take",
                file=sys.stderr,
            )
    return [context for context in contexts if context + contract.CHUNK_ROWS <= longest]


def stream_bandwidth(threads: int) -> Callable[[], float]:
    """-> a measurement of bytes a second that `threads` threads read from memory"""
    parts = np.array_split(np.ones(STREAM_BYTES // 4, np.float32), threads)

    def measure() -> float:
        with ThreadPoolExecutor(threads) as pool:
            started = time.perf_counter()
            list(pool.map(lambda part: np.dot(part, part), parts))
            return STREAM_BYTES / (time.perf_counter() - started)

    return measure


def measure(
    all_models: dict[str, Models], manifest: Manifest, context: int, prefills: list[int], rounds: int, threads: int
):
    """-> {(backend, call): seconds of each round}, {(backend, call): seconds of the host}, bandwidth of each round"""
    todo = {
        (backend, name): call
        for backend, models in all_models.items()
        for name, call in calls(models, manifest, context, prefills).items()
    }
    for call in todo.values():
        call()  # shapes are planned, pages are read
    seconds, host, bandwidths = {key: [] for key in todo}, {key: [] for key in todo}, []
    stream = stream_bandwidth(threads)
    for _ in tqdm(range(rounds), desc=f"context {context}", unit="round", disable=None):
        bandwidths.append(max(stream() for _ in range(3)))
        for (backend, name), call in todo.items():
            if name == "decode":
                call()  # the first after another backend's calls finds the processor's caches and pools as those left them
            all_models[backend].timer.take()
            started = time.perf_counter()
            call()
            spent = time.perf_counter() - started
            seconds[backend, name].append(spent)
            host[backend, name].append(spent - sum(all_models[backend].timer.take()))
    return seconds, host, bandwidths


def spread(values: list[float]) -> float:
    """Half of the middle half's width, as a share of the median."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return (high - low) / 2 / middle


def print_table(
    context: int, all_models: dict[str, Models], seconds: dict, host: dict, bandwidths: list[float]
) -> None:
    bandwidth = statistics.median(bandwidths)
    print(f"\ncontext {context}, memory read at {bandwidth / 1e9:.1f} GB/s (±{spread(bandwidths):.0%})")
    print(f"{'backend':10}  {'call':12}  {'ms':>8}  {'±':>4}  {'/ decode':>8}  {'tokens/s':>8}  {'host':>5}")
    for (backend, name), values in seconds.items():
        spent, one = statistics.median(values), statistics.median(seconds[backend, "decode"])
        tokens = int(name.split()[-1]) if name.startswith("prefill") else 1
        rate = f"{tokens / spent:8.1f}" if tokens > 1 or name == "decode" else ""
        share = statistics.median(host[backend, name]) / spent
        print(
            f"{backend:10}  {name:12}  {spent * 1e3:8.1f}  {spread(values):4.0%}  {spent / one:8.2f}  {rate:8}  {share:5.1%}"
        )
    for backend, models in all_models.items():
        limit = models.weight_bytes / bandwidth
        one = statistics.median(seconds[backend, "decode"])
        print(
            f"{backend}: decode reads {models.weight_bytes / 1e6:.0f} MB of weights, {limit * 1e3:.1f} ms at that rate: "
            f"{limit / one:.0%} of the limit"
        )
    if max(map(spread, seconds.values())) > BUSY_SPREAD:
        print("times vary: other programs may keep the machine busy; measure again when it is idle")
    if len(all_models) == 2:
        names = [name for backend, name in seconds if backend == "onnx"]
        ratios = (
            f"{name} {statistics.median(seconds['onnx', name]) / statistics.median(seconds['executorch', name]):.2f}"
            for name in names
        )
        print(f"onnx / executorch: {', '.join(ratios)}")


def parser() -> argparse.ArgumentParser:
    one = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__.splitlines()[0])
    one.add_argument("bundle", type=Path)
    one.add_argument("--backend", choices=("onnx", "executorch", "all"), default="all")
    one.add_argument("--contexts", type=numbers, default=[512, 3968], metavar="N,..", help="default: 512,3968")
    one.add_argument("--prefill", type=numbers, default=[128, 512], metavar="N,..", help="default: 128,512")
    one.add_argument("--rounds", type=number, default=7)
    one.add_argument("--threads", type=number, default=default_threads())
    return one


def main(options: argparse.Namespace) -> int:
    try:
        manifest = contract.load(options.bundle)
        held = [name for name in manifest.backends if installed(name) and options.backend in (name, "all")]
        if not held:
            raise ValueError(f"{options.bundle}: holds {', '.join(manifest.backends)}, not {options.backend}")
        all_models = {name: load_models(options.bundle, manifest, name, options.threads) for name in held}
        longest = min(models.target.max_context_tokens for models in all_models.values())
        for context in fitting(options.contexts, longest):
            found = measure(all_models, manifest, context, options.prefill, options.rounds, options.threads)
            print_table(context, all_models, *found)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
