"""optimum-cli export gemma4-mtp: `python -m export custom` with the names that optimum gives to arguments.

Optimum imports every register file of its namespace at each start, so the exporter is imported when it runs.
"""

import sys
from argparse import ArgumentParser
from pathlib import Path

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand


class Gemma4MtpExportCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(
        name="gemma4-mtp",
        help="Export Gemma 4 and its MTP drafter as quantized graphs for CPUs, with the host's tables.",
    )

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.add_argument("-m", "--model", required=True, metavar="DIR_OR_ID", help="target: folder or hub id")
        parser.add_argument(
            "--assistant-model", required=True, metavar="DIR_OR_ID", help="its drafter: folder or hub id"
        )
        formats = ("int8", "int4", "small", "fp32")
        parser.add_argument("--weight-format", choices=formats, default="int8", help="default: int8")
        parser.add_argument("--ple-bits", choices=("4", "8"), help="of the per-layer embedding table; default: 8")
        parser.add_argument("--backend", choices=("onnx", "executorch", "all"), default="onnx", help="default: onnx")
        parser.add_argument(
            "--kv", choices=("fp32", "fp16", "int8"), default="fp32", help="KV cache rows; default: fp32"
        )
        parser.add_argument("--context", type=int, metavar="N", help="most tokens of a text on ExecuTorch")
        parser.add_argument("--force", action="store_true", help="replace an existing bundle")
        parser.add_argument("output", type=Path, help="bundle folder")

    def run(self) -> None:
        from export.__main__ import main

        args = self.args
        arguments = ["custom", f"--{args.weight_format}", f"--checkpoint={args.model}"]
        arguments += [f"--drafter={args.assistant_model}", f"--out={args.output}", f"--backend={args.backend}"]
        arguments += [f"--kv={args.kv}"]
        arguments += [f"--context={args.context}"] if args.context is not None else []
        arguments += [f"--ple-bits={args.ple_bits}"] if args.ple_bits else []
        sys.exit(main([*arguments, *(["--force"] if args.force else [])]))


REGISTER_COMMANDS = [(Gemma4MtpExportCommand, ExportCommand)]
