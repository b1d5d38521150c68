"""optimum-cli export gemma4-mtp: the real command finds the register file where the package is installed, and writes the
bundle that python -m export writes."""

import dataclasses
import importlib.util
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from export import __main__ as exporter
from runtime_py import manifest as contract

from .pairs import TINY

CLI = Path(sys.executable).parent / "optimum-cli"
pytestmark = pytest.mark.skipif(
    not CLI.exists() or importlib.util.find_spec("optimum.commands.base") is None,
    reason="optimum is not installed: pip install -c constraints.txt -e '.[export,optimum]'",
)
PAIR = ("--model", TINY / "target", "--assistant-model", TINY / "assistant")


def optimum_cli(folder: Path, *arguments: object) -> subprocess.CompletedProcess:
    """From a folder that is not the repository, so that the installed package counts."""
    return subprocess.run(
        [sys.executable, CLI, "export", *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=300
    )


def test_optimum_lists_it_with_optimums_names(tmp_path):
    listed = optimum_cli(tmp_path, "--help")
    assert listed.returncode == 0 and "gemma4-mtp" in listed.stdout, listed.stderr
    told = optimum_cli(tmp_path, "gemma4-mtp", "--help").stdout
    for name in ("-m DIR_OR_ID", "--assistant-model DIR_OR_ID", "--weight-format {int8,int4,small,fp32}", "output"):
        assert name in told


def test_it_writes_the_bundle_of_the_exporter(tmp_path, bundle_of):
    result = optimum_cli(tmp_path, "gemma4-mtp", *PAIR, "--weight-format", "int8", "bundle")
    assert result.returncode == 0, result.stderr
    assert "run it:\n  python -m runtime_py generate bundle " in result.stdout
    ours, theirs = contract.load(tmp_path / "bundle"), contract.load(bundle_of("tiny"))
    assert dataclasses.replace(ours, name="tiny") == theirs and ours.name == "custom"
    shutil.rmtree(tmp_path / "bundle")


def test_bad_input_is_one_line(tmp_path):
    result = optimum_cli(tmp_path, "gemma4-mtp", "--model", "nowhere", "--assistant-model", "nowhere", "bundle")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: checkpoint 'nowhere' is neither a folder nor a hub id (owner/name)\n"
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ([], {"recipe": "int8", "backend": "onnx", "context": None, "force": False, "kv": "fp32"}),
        (["--weight-format", "small", "--ple-bits", "4"], {"recipe": "small", "ple_bits": 4}),
        (["--weight-format", "int4", "--kv", "int8", "--force"], {"recipe": "int4", "force": True, "kv": "int8"}),
        (["--weight-format", "fp32", "--backend", "all", "--context", "512"], {"recipe": "fp32", "context": 512}),
    ],
)
def test_every_argument_arrives(monkeypatch, given, want):
    from optimum.commands.register.register_gemma4_mtp import Gemma4MtpExportCommand

    calls = []
    monkeypatch.setattr(exporter, "main", lambda arguments: calls.append(arguments) or 7)
    parser = ArgumentParser()
    command = Gemma4MtpExportCommand(parser.add_subparsers())
    command.args = parser.parse_args(["gemma4-mtp", "-m", "a b", "--assistant-model=b", *given, "c"])
    with pytest.raises(SystemExit) as end:
        command.run()
    options = exporter.parser().parse_args(calls[0])
    assert end.value.code == 7
    assert (options.command, options.checkpoint, options.drafter, options.out) == ("custom", "a b", "b", Path("c"))
    assert {name: getattr(options, name) for name in want} == want
