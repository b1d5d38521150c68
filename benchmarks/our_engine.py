"""This project's runtime for `turns`: python -m benchmarks.our_engine BUNDLE BACKEND CONTEXT THREADS.

The calls are those of benchmarks.decode, and rounds of drafting: K drafts and the verify of K + 1 rows.
"""

import sys
from pathlib import Path

import numpy as np

from benchmarks.decode import Models, calls, filled_cache
from benchmarks.ids import random_ids
from benchmarks.turns import Call, serve
from runtime_py import manifest as contract
from runtime_py.bench import GraphTimer
from runtime_py.loading import Pair, load

DRAFTS = 3  # of a round, llama.cpp's default


def load_pair(bundle: Path, backend: str, context: int, threads: int) -> Pair:
    pair = load(bundle, threads, DRAFTS, backend=backend, drafter="mtp")
    if pair.off_reason:
        raise ValueError(f"{bundle}: {pair.off_reason}")
    if context + contract.CHUNK_ROWS > pair.target.max_context_tokens:
        raise ValueError(
            f"--context {context}: with the {contract.CHUNK_ROWS} tokens of a call it is longer than the "
            f"{pair.target.max_context_tokens} that {bundle} takes on {backend}"
        )
    return pair


def first_token(pair: Pair) -> None:
    pair.target.forward(pair.target.new_cache(contract.CHUNK_ROWS), random_ids(pair.target.spec.vocab_size, 1))


def engine_calls(pair: Pair, context: int) -> dict[str, Call]:
    models = Models(pair.target, pair.drafter, GraphTimer(), weight_bytes=0)
    return calls(models, pair.manifest, context, [context]) | {"round": _round(pair, context)}


def _round(pair: Pair, context: int) -> Call:
    """Without the commit of what is accepted, which takes a tenth of a millisecond."""
    cache, pending = filled_cache(pair.target, pair.manifest, context), random_ids(pair.target.spec.vocab_size, 1)[0]
    hidden = np.random.default_rng(2).normal(0, 1, pair.target.spec.hidden_size).astype(np.float32)

    def run() -> None:
        drafts = pair.drafter.draft(cache, pending, hidden, DRAFTS)
        pair.target.forward(cache, [pending, *drafts]).logits.argmax(1)

    return run


def main(bundle: str, backend: str, context: str, threads: str) -> int:
    return serve(
        lambda: load_pair(Path(bundle), backend, int(context), int(threads)),
        first_token,
        lambda pair: engine_calls(pair, int(context)),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
