"""llama.cpp and this runtime in turns on a pair of one size: python -m benchmarks.against_llama_cpp BUNDLE.

Both have random weights of the same geometry, which no time depends on, and run the same token ids on as many threads. Each
is a process of its own. A round times every call of one engine, then of the next; ratios are of one round, so that a
machine that gets slower slows both. benchmarks/README.md says what the files hold and how to read the table.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks import llama_cpp_build
from benchmarks.arguments import number, number_or_zero
from benchmarks.ids import ROWS
from benchmarks.llama_cpp_build import ROOT, Build
from benchmarks.llama_cpp_report import LLAMA, Measured, lines
from benchmarks.our_engine import DRAFTS
from benchmarks.turns import Engine, Loaded
from runtime_py import manifest as contract
from runtime_py.cpus import default_threads
from runtime_py.graph import installed
from runtime_py.manifest import Manifest

TYPES = {"int8": "Q8_0", "int4": "Q4_0"}  # of the recipe's bits
SPARE_TOKENS, DRAFT_TOKENS = 64, 32  # room behind the context, tokens that are drafted and verified
# llama.cpp's programs do not wait for the thread that prints: a small model's often end before their last words
TRIES = 20
BITS = {"Q4_0": 4.5, "Q6_K": 6.5625, "Q8_0": 8.5, "BF16": 16}
DECODED = re.compile(r"decoded +(\d+) tokens in +([\d.]+) seconds")
COUNTS = {name: re.compile(rf"{name} += +(\d+)") for name in ("n_drafted", "n_accept")}


@dataclass(frozen=True)
class Speculation:
    """What llama-speculative-simple tells of a text: rounds of drafts and a verify, and how long they took."""

    rounds: int
    seconds: float
    drafted: int
    accepted: int


def parse_speculation(text: str) -> Speculation | None:
    """What llama-speculative-simple prints, None if it is not all there. A round adds a token of the target's own to those
    that it accepted."""
    decoded, counts = DECODED.search(text), {name: pattern.search(text) for name, pattern in COUNTS.items()}
    if not decoded or not all(counts.values()):
        return None
    accepted = int(counts["n_accept"][1])
    return Speculation(int(decoded[1]) - accepted, float(decoded[2]), int(counts["n_drafted"][1]), accepted)


def geometry(manifest: Manifest, target: Path | None, drafter: Path | None) -> dict:
    """What random_gguf reads: of a named size, or of the config.json in two folders; as the bundle's."""
    import torch
    from transformers import AutoConfig

    from export.config import drafter_config, target_config
    from export.sizes import SIZES, drafter_of, target_of

    if target and drafter:
        pair = AutoConfig.from_pretrained(target), AutoConfig.from_pretrained(drafter)
    elif size := SIZES.get(manifest.name):
        pair = target_of(size), drafter_of(size)
    else:
        raise ValueError(f"{manifest.name} is no size that is known; name the pair with --checkpoint and --drafter")
    config, draft_config = target_config(pair[0], torch.bfloat16), drafter_config(pair[1])
    spec = manifest.target
    for name, mine, bundles in (
        ("hidden_size", config.hidden_size, spec.hidden_size),
        ("layers", len(config.layers), spec.num_layers),
        ("vocab_size", config.vocab_size, spec.vocab_size),
        ("hidden_size of the drafter", draft_config.hidden_size, manifest.drafter.hidden_size),
    ):
        if mine != bundles:
            raise ValueError(f"{name} is {bundles} in the bundle, {mine} in the pair; name the bundle's own pair")
    return {"target": asdict(config), "drafter": asdict(draft_config)}


def gguf_files(build: Build, folder: Path, pair: dict, type_name: str) -> tuple[Path, Path]:
    """-> target and drafter, written unless they are there"""
    target, drafter, record = folder / f"target-{type_name}.gguf", folder / "drafter.gguf", folder / "geometry.json"
    text = json.dumps(pair)
    if not (target.is_file() and drafter.is_file() and record.is_file() and record.read_text("utf-8") == text):
        folder.mkdir(parents=True, exist_ok=True)
        need, free = gguf_bytes(pair, type_name), shutil.disk_usage(folder).free
        if need > free:
            raise ValueError(f"{folder}: {free / 1e9:.1f} GB are free, {need / 1e9:.1f} GB are needed; free some")
        record.write_text(text, encoding="utf-8")
        print(f"writing {target}, {need / 1e9:.2f} GB", file=sys.stderr)
        command = [build.python, "-m", "benchmarks.random_gguf", record, folder, type_name]
        _run(command)
    return target, drafter


def gguf_bytes(pair: dict, type_name: str) -> int:
    """Of the two tables and all linears of the target, within a few per cent; what the disk must hold."""
    target, linear = pair["target"], BITS[type_name]
    table = BITS["Q6_K" if type_name == "Q4_0" else "Q8_0"]
    hidden, size, layers = target["hidden_size"], target["per_layer_input_size"], target["layers"]
    bits = target["vocab_size"] * (hidden + size * len(layers)) * table + hidden * size * len(layers) * BITS["BF16"]
    for layer in layers:
        heads = 2 * target["query_heads"] + 2 * target["kv_heads"] * (layer["donor"] == layer["index"])
        bits += linear * hidden * (heads * layer["head_dim"] + 3 * layer["intermediate_size"] + 2 * size)
    drafter = pair["drafter"]
    return int(bits / 8 + 2 * drafter["vocab_size"] * drafter["hidden_size"])


def bundle_bytes(bundle: Path, manifest: Manifest, backend: str) -> int:
    """Files that the backend reads: graphs and the tables that both share; ExecuTorch's packed cache not counted."""
    other = [f"{name}/" for name in manifest.backends if name != backend]
    return sum(spec.size_bytes for file, spec in manifest.files.items() if not file.startswith(tuple(other) or ("//",)))


def _run(command: list[object]) -> str:
    """-> stdout and stderr. ValueError if it fails."""
    words = [str(part) for part in command]
    done = subprocess.run(
        words, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace"
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ValueError(f"{' '.join(words[:3])} ...: exit code {done.returncode}: {last}")
    return done.stdout + done.stderr


def speculate(build: Build, target: Path, drafter: Path, context: int, threads: int) -> Speculation:
    """llama.cpp's own draft-mtp, with DRAFTS drafts in every round, behind a prompt of `context` tokens."""
    prompt = target.parent / f"prompt-{context}.txt"
    prompt.write_text("x" * (context - 1), encoding="utf-8")  # a token each, behind the bos
    size = context + SPARE_TOKENS + DRAFT_TOKENS
    command = [
        build.speculative,
        "-m",
        target,
        "-md",
        drafter,
        "-f",
        prompt,
        "-n",
        DRAFT_TOKENS,
        "-c",
        size,
        "-b",
        size,
    ]
    command += ["-t", threads, "--temp", 0, "--ignore-eos", "--spec-type", "draft-mtp"]
    command += ["--spec-draft-n-max", DRAFTS, "--spec-draft-p-min", 0]
    for _ in range(TRIES):
        if found := parse_speculation(said := _run(command)):
            return found
    raise ValueError(f"{build.speculative} tells no counts in {TRIES} runs; the last ends with {said.strip()[-200:]!r}")


def measure(
    commands: dict[str, list[object]],
    sizes: dict[str, int],
    options: argparse.Namespace,
    speculation: Callable[[], Speculation],
    logs: Path,
) -> dict[str, Measured]:
    """Load in turns, then call in turns, then draft in turns. commands, sizes: of each engine, by name."""
    with ExitStack() as stack:
        engines, loaded = _load(commands, options.loads, logs, stack)
        seconds = _time_calls(engines, call_names(options.context), options.rounds)
        rounds_s = _time_drafts(engines, options.draft_runs, speculation)
        return {
            name: Measured(tuple(loaded[name]), engine.memory(), seconds[name], rounds_s[name], sizes[name])
            for name, engine in engines.items()
        }


def _load(
    commands: dict[str, list[object]], loads: int, logs: Path, stack: ExitStack
) -> tuple[dict[str, Engine], dict[str, list[Loaded]]]:
    """-> the engines of the last turn, which the stack ends; what each load took"""
    loaded: dict[str, list[Loaded]] = {name: [] for name in commands}
    engines = {}
    for turn in tqdm(range(loads), desc="loading", unit="turn", disable=None):
        for name, command in commands.items():
            engine = Engine(command, ROOT, logs / f"{name}.log")
            loaded[name].append(engine.loaded)
            if turn == loads - 1:
                engines[name] = stack.enter_context(engine)
            else:
                engine.close()
    return engines, loaded


def _time_calls(engines: dict[str, Engine], calls: list[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """-> engine -> call -> seconds of each round"""
    seconds = {name: {call: [] for call in calls} for name in engines}
    for engine in engines.values():
        for call in calls:
            engine.seconds(call)  # shapes are planned, pages are read
    for _ in tqdm(range(rounds), desc="calls", unit="round", disable=None):
        for name, engine in engines.items():
            engine.seconds("decode")  # finds the caches as the other engine left them
            for call in calls:
                seconds[name][call].append(engine.seconds(call))
    return seconds


def _time_drafts(
    engines: dict[str, Engine], runs: int, speculation: Callable[[], Speculation]
) -> dict[str, list[float]]:
    """-> engine -> seconds of a round with drafts in each run"""
    rounds_s: dict[str, list[float]] = {name: [] for name in engines}
    for _ in tqdm(range(runs), desc="drafting", unit="turn", disable=None):
        for name, engine in engines.items():
            if name == LLAMA:
                found = speculation()
                rounds_s[name].append(found.seconds / found.rounds)
            else:
                engine.seconds("round")
                rounds_s[name].append(statistics.mean(engine.seconds("round") for _ in range(DRAFT_TOKENS)))
    return rounds_s


def call_names(context: int) -> list[str]:
    return [f"prefill {context}", *("decode" if rows == 1 else f"verify {rows}" for rows in ROWS)]


def parser() -> argparse.ArgumentParser:
    one = argparse.ArgumentParser(prog="python -m benchmarks.against_llama_cpp", description=__doc__.splitlines()[0])
    one.add_argument("bundle", type=Path)
    one.add_argument("--backend", choices=("onnx", "executorch", "all"), default="all")
    one.add_argument("--type", choices=tuple(TYPES.values()), help="of llama.cpp's file; default: the bundle's bits")
    one.add_argument("--context", type=number, default=512, help="tokens of a prefill and before the other calls")
    one.add_argument("--rounds", type=number, default=7)
    one.add_argument("--loads", type=number, default=3)
    one.add_argument("--draft-runs", type=number_or_zero, default=3, help="0: no drafts")
    one.add_argument("--threads", type=number, default=default_threads())
    one.add_argument(
        "--checkpoint", type=Path, help="folder with the target's config.json, for a bundle of another size"
    )
    one.add_argument("--drafter", type=Path, help="folder with the drafter's config.json")
    one.add_argument("--llama-cpp", type=Path, default=llama_cpp_build.FOLDER, help="where llama_cpp_build put it")
    one.add_argument("--gguf", type=Path, help="folder for the GGUF files; default: build/gguf-NAME")
    return one


def run(options: argparse.Namespace) -> None:
    build, manifest = llama_cpp_build.find(options.llama_cpp), contract.load(options.bundle)
    held = [name for name in manifest.backends if installed(name) and options.backend in (name, "all")]
    if not held:
        raise ValueError(f"{options.bundle}: holds {', '.join(manifest.backends)}, not {options.backend}")
    recipe = manifest.backends[held[0]].quantization.recipe
    if not (type_name := options.type or TYPES.get(recipe)):
        raise ValueError(
            f"{options.bundle}: {recipe} is like neither of {', '.join(TYPES.values())}; choose with --type"
        )
    pair = geometry(manifest, options.checkpoint, options.drafter)
    folder = (options.gguf or ROOT / f"build/gguf-{manifest.name}").absolute()
    target, drafter = gguf_files(build, folder, pair, type_name)
    size = options.context, options.threads
    commands: dict[str, list[object]] = {
        LLAMA: [build.python, "-m", "benchmarks.llama_cpp_engine", target, drafter, *size]
    }
    sizes = {LLAMA: target.stat().st_size + drafter.stat().st_size}
    for name in held:
        commands[name] = [sys.executable, "-m", "benchmarks.our_engine", options.bundle.absolute(), name, *size]
        sizes[name] = bundle_bytes(options.bundle, manifest, name)
    found = measure(commands, sizes, options, lambda: speculate(build, target, drafter, *size), folder)
    print(
        f"{manifest.name}, {recipe} and llama.cpp {type_name} (llama-cpp-python {llama_cpp_build.VERSION}), "
        f"{options.threads} threads, context {options.context}; median (lowest to highest) of {options.rounds} rounds, "
        f"{options.loads} loads, {options.draft_runs} runs with {DRAFTS} drafts a round"
    )
    print("\n".join(lines(found)))


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    try:
        run(options)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
