"""Command line: python -m export {tiny|e2b|e4b} [--int8|--int4|--fp32] ..., python -m export check BUNDLE."""

import argparse
import logging
import os
import sys
from pathlib import Path

MIN_CONTEXT = 128  # tokens
MODELS = Path(__file__).parent.parent / "models"
SOURCES = {  # name -> target, drafter
    "tiny": (str(MODELS / "tiny/target"), str(MODELS / "tiny/assistant")),
    "e2b": ("google/gemma-4-E2B-it", "google/gemma-4-E2B-it-assistant"),
    "e4b": ("google/gemma-4-E4B-it", "google/gemma-4-E4B-it-assistant"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ValueError(f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="python -m export", description="Gemma 4 and its MTP drafter -> quantized graphs for CPUs")
    commands = top.add_subparsers(dest="command", required=True, metavar="{tiny,e2b,e4b,check}")
    for name, (target, drafter) in SOURCES.items():
        sub = commands.add_parser(name, help=f"export {name}", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        recipe = sub.add_mutually_exclusive_group()
        for choice, text in (
            ("int8", "8 bit weights"),
            ("int4", "4 bit linears of the target"),
            ("fp32", "no quantization"),
        ):
            recipe.add_argument(
                f"--{choice}", dest="recipe", action="store_const", const=choice, default="int8", help=text
            )
        sub.add_argument("--checkpoint", metavar="DIR_OR_ID", default=target, help="target: folder or hub id")
        sub.add_argument("--drafter", metavar="DIR_OR_ID", default=drafter, help="assistant: folder or hub id")
        sub.add_argument("--out", metavar="DIR", type=Path, help=f"bundle folder (default: build/{name}-RECIPE)")
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


def main(arguments: list[str]) -> int:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for chatty in ("torchao", "torch.utils._pytree"):  # what they say at import concerns nobody here
        logging.getLogger(chatty).setLevel(logging.ERROR)
    try:
        options = parser().parse_args(arguments)
        if options.command == "check":
            from .check import check_bundle

            check_bundle(options.bundle)
        else:
            _export(options)
    except ImportError as error:
        print(f"error: {error}; install the exporter with pip install -e '.[export]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the bundle has no manifest and does not load", file=sys.stderr)
        return 130
    return 0


def _export(options: argparse.Namespace) -> None:
    from .package import export_package
    from .report import print_report

    out = options.out or Path("build") / f"{options.command}-{options.recipe}"
    backends = ("onnx", "executorch") if options.backend == "all" else (options.backend,)
    if options.context is not None and "executorch" not in backends:
        raise ValueError("--context is for ExecuTorch's files; add --backend executorch or all")
    if options.context is not None and options.context < MIN_CONTEXT:
        raise ValueError(f"--context {options.context} is too small; give at least {MIN_CONTEXT}")
    package = export_package(
        options.command,
        options.checkpoint,
        options.drafter,
        options.recipe,
        out,
        options.force,
        backends,
        options.context,
    )
    print_report(package, out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
