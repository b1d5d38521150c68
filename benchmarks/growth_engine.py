"""This project's runtime for `growth`: python -m benchmarks.growth_engine BUNDLE BACKEND THREADS CONTEXTS ROWS."""

import sys
from pathlib import Path

from benchmarks.decode import filled_cache
from benchmarks.ids import random_ids
from benchmarks.our_engine import first_token
from benchmarks.turns import Call, serve
from runtime_py.loading import Pair, load


def call_name(context: int, rows: int) -> str:
    return f"{context} {rows}"


def growth_calls(pair: Pair, contexts: list[int], row_counts: list[int]) -> dict[str, Call]:
    """call_name -> a step of the target of so many rows behind so many committed ones"""
    ids = random_ids(pair.target.spec.vocab_size, max(row_counts))

    def step(context: int) -> dict[str, Call]:
        cache = filled_cache(pair.target, pair.manifest, context)
        return {
            call_name(context, rows): lambda rows=rows: pair.target.forward(cache, ids[:rows]) for rows in row_counts
        }

    return {name: call for context in contexts for name, call in step(context).items()}


def main(bundle: str, backend: str, threads: str, contexts: str, row_counts: str) -> int:
    numbers = [[int(number) for number in text.split(",")] for text in (contexts, row_counts)]
    return serve(
        lambda: load(Path(bundle), int(threads), 0, backend=backend),
        first_token,
        lambda pair: growth_calls(pair, *numbers),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
