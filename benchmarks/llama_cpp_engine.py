"""llama.cpp for `turns`: python -m benchmarks.llama_cpp_engine TARGET.gguf DRAFTER.gguf CONTEXT THREADS, in its environment.

By llama.cpp's own functions (llama_decode with a llama_batch), with its defaults: weights mapped, float16 keys and values,
flash attention where it thinks fit, as many rows in a batch as a prefill has. The window's cache is the small one, as
its own programs have it. Each call starts at CONTEXT tokens; what it adds is removed before the next.
"""

import ctypes
import sys

import llama_cpp

from benchmarks.ids import ROWS, random_ids
from benchmarks.turns import Call, serve

SPARE = 64  # positions of the cache behind the context


class Model:
    """The target with a context of its own, and the drafter's weights, held as a program with drafts holds them."""

    def __init__(self, target: str, drafter: str, context: int, threads: int):
        llama_cpp.llama_backend_init()
        self._weights = _load(target)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = context + SPARE
        options.n_batch = max(options.n_batch, context)
        options.n_threads = options.n_threads_batch = threads
        options.swa_full = False
        self._context = llama_cpp.llama_init_from_model(self._weights, options)
        if not self._context:
            raise ValueError(f"{target}: llama.cpp makes no context of {context + SPARE} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._drafter = _load(drafter)
        vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._weights))
        rows = max(ROWS[-1], context)
        self._ids, self._batch = random_ids(vocab_size, rows), llama_cpp.llama_batch_init(rows, 0, 1)

    def run(self, start: int, rows: int, all_logits: bool) -> None:
        """Decode rows at positions start.., of all or of the last row with logits."""
        batch = self._batch
        batch.n_tokens = rows
        for i in range(rows):
            batch.token[i] = self._ids[i]
            batch.pos[i] = start + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = all_logits or i == rows - 1
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: code {code} for {rows} rows at {start}")
        llama_cpp.llama_synchronize(self._context)

    def cut(self, length: int) -> None:
        """Forget what follows the first `length` tokens."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise RuntimeError(f"llama.cpp cannot forget what follows {length} tokens")


def _load(path: str) -> ctypes.c_void_p:
    weights = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not weights:
        raise ValueError(f"{path}: llama.cpp does not load it")
    return weights


def calls(model: Model, context: int) -> dict[str, Call]:
    def verify(rows: int) -> Call:
        def run() -> None:
            model.cut(context)
            model.run(context, rows, True)

        return run

    def prefill() -> None:
        model.cut(0)
        model.run(0, context, False)

    found = {("decode" if rows == 1 else f"verify {rows}"): verify(rows) for rows in ROWS}
    return {f"prefill {context}": prefill} | found


def main(target: str, drafter: str, context: str, threads: str) -> int:
    return serve(
        lambda: Model(target, drafter, int(context), int(threads)),
        lambda model: model.run(0, 1, True),
        lambda model: calls(model, int(context)),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
