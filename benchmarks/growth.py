"""How the cost of a step grows with its context, its rows and its threads: python -m benchmarks.growth BUNDLE.

Each number of threads is a process of its own, for a process has one pool of threads. A round makes every call once, in
every process; the tables show medians over the rounds.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from benchmarks.arguments import number, numbers
from benchmarks.decode import BUSY_SPREAD, fitting, spread
from benchmarks.growth_engine import call_name
from benchmarks.turns import Engine
from runtime_py import manifest as contract
from runtime_py.cpus import default_threads
from runtime_py.loading import choose_backend

ROOT = Path(__file__).resolve().parent.parent
CONTEXTS = [128, 512, 1024, 2048, 3968, 8192, 16384, 32640]
ROWS = [1, 2, 3, 4, 5, 8, 12, 16]

Times = dict[tuple[int, int, int], list[float]]  # (threads, context, rows) -> seconds of each round


def measure(
    bundle: Path, backend: str, threads: list[int], contexts: list[int], row_counts: list[int], rounds: int
) -> Times:
    """ValueError if a process ends before its time."""
    times: Times = {key: [] for key in itertools.product(threads, contexts, row_counts)}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="growth-")))
        engines = {}
        for count in threads:
            what = bundle.absolute(), backend, count, _joined(contexts), _joined(row_counts)
            command = [sys.executable, "-m", "benchmarks.growth_engine", *what]
            engines[count] = stack.enter_context(Engine(command, ROOT, logs / f"{count}.log"))
        for _ in tqdm(range(rounds + 1), desc=backend, unit="round", disable=None):
            for (count, context, rows), spent in times.items():
                spent.append(engines[count].seconds(call_name(context, rows)))
    return {key: spent[1:] for key, spent in times.items()}  # in the first round shapes are planned and pages read


def print_tables(backend: str, times: Times) -> None:
    """ms by context and rows for each number of threads, with ratios to the fewest rows, context and threads."""
    middle = {key: statistics.median(spent) for key, spent in times.items()}
    threads, contexts, row_counts = (sorted({key[place] for key in times}) for place in range(3))
    fewest = row_counts[0]
    for count in threads:
        print(f"\n{backend}, threads {count}, ms of a step (in times that of {fewest} rows at its context)")
        print(f"{'context':>8}{'grown to':>9}" + "".join(f"{f'rows {rows}':>16}" for rows in row_counts))
        for context in contexts:
            one = middle[count, context, fewest]
            cells = (middle[count, context, rows] for rows in row_counts)
            grown = one / middle[count, contexts[0], fewest]
            print(f"{context:8}{grown:9.2f}" + "".join(f"{cell * 1e3:9.1f} ({cell / one:4.2f})" for cell in cells))
    for count in threads[1:]:
        gained = [middle[threads[0], *key] / middle[count, *key] for key in itertools.product(contexts, row_counts)]
        print(f"{backend}: {count} threads are {min(gained):.2f} to {max(gained):.2f} times as fast as {threads[0]}")
    if max(map(spread, times.values())) > BUSY_SPREAD:
        print("times vary: other programs may keep the machine busy; measure again when it is idle")


def _joined(counts: list[int]) -> str:
    return ",".join(map(str, counts))


def parser() -> argparse.ArgumentParser:
    one = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.splitlines()[0])
    one.add_argument("bundle", type=Path)
    one.add_argument("--backend", choices=("auto", "onnx", "executorch"), default="auto")
    one.add_argument("--contexts", type=numbers, default=CONTEXTS, metavar="N,..", help=f"default: {_joined(CONTEXTS)}")
    one.add_argument("--rows", type=numbers, default=ROWS, metavar="N,..", help=f"default: {_joined(ROWS)}")
    every = list(range(1, default_threads() + 1))
    one.add_argument("--threads", type=numbers, default=every, metavar="N,..", help=f"default: {_joined(every)}")
    one.add_argument("--rounds", type=number, default=5)
    return one


def main(options: argparse.Namespace) -> int:
    try:
        manifest = contract.load(options.bundle)
        backend = choose_backend(manifest, options.backend)
        contexts = fitting(options.contexts, manifest.backends[backend].max_context_tokens)
        if not contexts or max(options.rows) > contract.CHUNK_ROWS:
            raise ValueError(f"--contexts and --rows: nothing to measure; rows are at most {contract.CHUNK_ROWS}")
        print_tables(backend, measure(options.bundle, backend, options.threads, contexts, options.rows, options.rounds))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
