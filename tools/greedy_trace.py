"""What one machine makes of a bundle: python -m tools.greedy_trace BUNDLE OUT.npz. It needs the runtime's packages alone.

Every held-out prompt of the tiny pair is continued greedily, plainly and with drafts; kept are the tokens and the logits
that chose each of them, [tokens, V]. The numbers of drafts change from prompt to prompt, so that blocks of 2 to 9 rows are run.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime_py.drafting import DraftPolicy
from runtime_py.loading import Pair, load
from runtime_py.sampling import GREEDY
from runtime_py.speculative import generate
from runtime_py.text import Text

PROMPTS = Path(__file__).parent.parent / "models/tiny/prompts.json"
DRAFTS = (3, 1, 5, 2, 8)
Array = np.ndarray


@dataclass(frozen=True)
class Trace:
    """A reply of n tokens: ids [n], logits [n, V] that chose them."""

    ids: Array
    logits: Array


@dataclass(frozen=True)
class PromptTraces:
    plain: Trace
    drafted: Trace
    accepted: int  # drafts that are in the text


def trace_prompts(bundle: Path, prompts: int, tokens: int, threads: int) -> list[PromptTraces]:
    """Of the first `prompts` prompts, `tokens` new tokens each or fewer where a text stops."""
    pair = load(bundle, threads, max(DRAFTS), backend="onnx", drafter="mtp")
    if pair.off_reason:
        raise ValueError(f"drafting is off: {pair.off_reason}")
    traces = []
    for place, prompt in enumerate(json.loads(PROMPTS.read_text(encoding="utf-8"))[:prompts]):
        ids = _prompt_ids(pair.text, prompt)
        plain, _ = _trace(pair, ids, tokens, 0)
        traces.append(PromptTraces(plain, *_trace(pair, ids, tokens, DRAFTS[place % len(DRAFTS)])))
    return traces


def _prompt_ids(text: Text, prompt: dict[str, str]) -> list[int]:
    if prompt["kind"] == "chat":
        return text.encode_chat([{"role": "user", "content": prompt["text"]}])
    return text.encode_prompt(prompt["text"])


def _trace(pair: Pair, prompt: list[int], tokens: int, drafts: int) -> tuple[Trace, int]:
    """-> the reply, how many of its tokens were drafted"""
    ids, logits = list(prompt), []

    def keep(_: list[int], row: Array) -> Array:
        logits.append(row.copy())
        return row

    cache = pair.target.new_cache()
    policy = DraftPolicy(drafts)
    rounds = generate(pair.target, pair.drafter, cache, ids, tokens, pair.text.tokens, policy, GREEDY, keep)
    accepted = sum(entry.accepted for entry in rounds)
    return Trace(np.array(ids[len(prompt) :]), np.stack(logits)), accepted


def save(path: Path, traces: list[PromptTraces]) -> None:
    arrays = {}
    for place, entry in enumerate(traces):
        for mode in ("plain", "drafted"):
            arrays[f"{place}.{mode}.ids"] = getattr(entry, mode).ids
            arrays[f"{place}.{mode}.logits"] = getattr(entry, mode).logits
        arrays[f"{place}.accepted"] = np.array(entry.accepted)
    np.savez(path, **arrays)


def read(path: Path) -> list[PromptTraces]:
    """What `save` wrote."""
    with np.load(path) as file:

        def trace(place: int, mode: str) -> Trace:
            return Trace(file[f"{place}.{mode}.ids"], file[f"{place}.{mode}.logits"])

        count = sum(name.endswith(".accepted") for name in file.files)
        return [
            PromptTraces(trace(place, "plain"), trace(place, "drafted"), int(file[f"{place}.accepted"]))
            for place in range(count)
        ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.greedy_trace", description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    try:
        save(options.out, trace_prompts(options.bundle, options.prompts, options.tokens, options.threads))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
