"""Command line: python -m export {tiny|e2b|e4b|custom} [--int8|--int4|--small|--fp32] ..., python -m export check BUNDLE."""

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

MIN_CONTEXT = 128  # tokens
KV_DTYPES = {"fp32": "float32", "fp16": "float16", "int8": "int8"}  # --kv -> dtype of committed KV rows
MODELS = Path(__file__).parent.parent / "models"
SOURCES = {  # name -> target, drafter; e2b and e4b must have that size, custom is a pair of the user's
    "tiny": (str(MODELS / "tiny/target"), str(MODELS / "tiny/assistant")),
    "e2b": ("google/gemma-4-E2B-it", "google/gemma-4-E2B-it-assistant"),
    "e4b": ("google/gemma-4-E4B-it", "google/gemma-4-E4B-it-assistant"),
    "custom": (None, None),
}


class _Parser(argparse.ArgumentParser):
    """Options have no short forms: one that is new could change what they mean."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, allow_abbrev=False, **settings)

    def error(self, message: str) -> None:
        raise ValueError(f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="python -m export", description="Gemma 4 and its MTP drafter -> quantized graphs for CPUs")
    commands = top.add_subparsers(dest="command", required=True, metavar="{tiny,e2b,e4b,custom,check}")
    for name, (target, drafter) in SOURCES.items():
        sub = commands.add_parser(name, help=f"export {name}")
        recipe = sub.add_mutually_exclusive_group()
        for choice, text in (
            ("int8", "8 bit weights"),
            ("int4", "4 bit linears of the target"),
            ("small", "4 bit weights, head and drafter too"),
            ("fp32", "no quantization"),
        ):
            recipe.add_argument(
                f"--{choice}", dest="recipe", action="store_const", const=choice, default="int8", help=text
            )
        sub.add_argument(
            "--kv",
            choices=tuple(KV_DTYPES),
            default="fp32",
            help="committed KV rows; int8 ones take a fourth of the memory (default: fp32)",
        )
        sub.add_argument(
            "--ple-bits",
            type=int,
            choices=(4, 8),
            help="of the per-layer embedding table: 4 halves the largest part, at a price in quality (default: 8)",
        )
        for option, source, what in (("--checkpoint", target, "target"), ("--drafter", drafter, "assistant")):
            text = f"{what}: folder or hub id (default: {source})" if source else f"{what}: folder or hub id"
            sub.add_argument(option, metavar="DIR_OR_ID", required=source is None, help=text)
        if name in ("e2b", "e4b"):
            _add_random_weights(sub)
        sub.add_argument(
            "--out",
            metavar="DIR",
            type=Path,
            help=f"bundle folder (default: build/{name}-RECIPE, -ple4 and -kv-KV if asked)",
        )
        sub.add_argument(
            "--backend", choices=("onnx", "executorch", "all"), default="onnx", help="which files to write"
        )
        sub.add_argument(
            "--context",
            type=int,
            metavar="N",
            help="most tokens of a text on ExecuTorch (default: 4096; more needs memory)",
        )
        sub.add_argument("--force", action="store_true", help="replace an existing bundle")
    check = commands.add_parser("check", help="verify a bundle: hashes, graph contracts, pair rules, row invariance")
    check.add_argument("bundle", type=Path)
    return top


def _add_random_weights(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--random-weights",
        type=int,
        nargs="?",
        const=0,
        metavar="SEED",
        help="a bundle of true size without a checkpoint, for measuring: its text means nothing (default seed: 0)",
    )
    sub.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE_OR_DIR",
        help="with --random-weights: a tokenizer.json, or a folder with it and a chat template (default: one made up of "
        "single bytes)",
    )


def main(arguments: list[str]) -> int:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for chatty in ("torchao", "torch.utils._pytree"):  # what they say at import concerns nobody here
        logging.getLogger(chatty).setLevel(logging.ERROR)
    try:
        options, unknown = parser().parse_known_args(arguments)
        if unknown:
            raise ValueError(
                f"unrecognized arguments: {' '.join(unknown)}; see python -m export {options.command} --help"
            )
        if options.command == "check":
            from .check import check_bundle

            check_bundle(options.bundle)
        else:
            _export(options)
    except ImportError as error:
        print(
            f"error: {error}; enter the environment with the exporter (. .venv/bin/activate), or pip install -e '.[export]'",
            file=sys.stderr,
        )
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print("interrupted: what was written has no manifest and does not load", file=sys.stderr)
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    return 0


def _terminate(number: int, frame: object) -> None:
    """Ends as Ctrl-C does, so that temporary files go and one line says what is left."""
    raise KeyboardInterrupt(number)


def _export(options: argparse.Namespace) -> None:
    from .package import export_package, export_pair
    from .report import print_report

    form = f"{options.recipe}-ple4" if options.ple_bits == 4 else options.recipe
    kv = "" if options.kv == "fp32" else f"-kv-{options.kv}"
    out = options.out or Path("build") / f"{options.command}-{form}{kv}"
    backends = ("onnx", "executorch") if options.backend == "all" else (options.backend,)
    if options.context is not None and "executorch" not in backends:
        raise ValueError("--context is for ExecuTorch's files; add --backend executorch or all")
    if options.context is not None and options.context < MIN_CONTEXT:
        raise ValueError(f"--context {options.context} is too small; give at least {MIN_CONTEXT}")
    how = options.recipe, out, options.force, backends, options.context, KV_DTYPES[options.kv], options.ple_bits
    if (seed := getattr(options, "random_weights", None)) is not None:
        with _random_pair(options, seed) as pair:
            package = export_pair(options.command, *pair, *how)
    else:
        if getattr(options, "tokenizer", None):
            raise ValueError("--tokenizer is for --random-weights; a checkpoint has its own")
        sources = zip((options.checkpoint, options.drafter), SOURCES[options.command], strict=True)
        package = export_package(options.command, *(given or default for given, default in sources), *how)
    print_report(package, out)


def _random_pair(options: argparse.Namespace, seed: int):
    """-> context manager of the pair of Weights"""
    from .random_weights import random_pair
    from .sizes import SIZES, drafter_of, target_of

    if given := [name for name in ("checkpoint", "drafter") if getattr(options, name)]:
        raise ValueError(f"--{given[0]} and --random-weights exclude each other; give one of them")
    if seed < 0:
        raise ValueError(f"--random-weights {seed}: a seed is at least 0")
    size = SIZES[options.command]
    return random_pair(target_of(size), drafter_of(size), options.tokenizer, seed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(main(sys.argv[1:]))
