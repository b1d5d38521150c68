"""benchmarks.decode times every call on every backend of a bundle, and leaves nothing out in silence."""

import subprocess
import sys
from pathlib import Path

import pytest

from .command_line import ROOT
from .conftest import BACKENDS

CALLS = ("decode", "verify 2", "verify 3", "verify 4", "verify 5", "verify 8", "draft step", "prefill 16")


def decode(*arguments: object) -> subprocess.CompletedProcess:
    return run("decode", *arguments)


def run(benchmark: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=120)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_call_has_a_line(bundle_of, backend):
    done = decode(bundle_of("tiny", backend=backend), "--contexts", "130,2048", "--prefill", 16, "--rounds", 2)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(f"{backend} ")]
    assert [line[12:24].strip() for line in lines] == list(CALLS)
    assert f"{backend}: decode reads " in done.stdout and "onnx / executorch" not in done.stdout
    assert done.stderr.splitlines() == [
        "context 2048: left out, with the 128 tokens of a call it is longer than the 2048 that the bundle's files take"
    ]


def test_bad_input_is_exit_code_2(bundle_of, tmp_path):
    assert f"error: {tmp_path}: no manifest.json" in decode(tmp_path).stderr
    assert "holds onnx, not executorch" in decode(bundle_of("tiny"), "--backend", "executorch").stderr
    for option in ("--rounds", "--threads", "--contexts", "--prefill"):
        done = decode(Path("bundle"), option, "0")
        assert done.returncode == 2 and "'0' is no number from 1 on" in done.stderr


def test_growth_has_a_row_for_every_context_and_a_table_for_every_number_of_threads(bundle_of):
    what = ("--contexts", "130,300,2048", "--rows", "1,5,16", "--threads", "1,2", "--rounds", 1)
    done = run("growth", bundle_of("tiny"), *what)
    assert done.returncode == 0, done.stderr
    assert "context 2048: left out" in done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(",")[1] for line in lines if line.startswith("onnx, threads")] == [" threads 1", " threads 2"]
    rows = [line.split() for line in lines if line.lstrip()[:4] in ("130 ", "300 ")]
    assert [row[0] for row in rows] == ["130", "300"] * 2
    assert {row[1] for row in rows[::2]} == {"1.00"} and all(row[3] == "(1.00)" for row in rows)
    assert any(line.startswith("onnx: 2 threads are ") for line in lines)


def test_growth_refuses_what_it_cannot_measure(bundle_of, tmp_path):
    assert f"error: {tmp_path}: no manifest.json" in run("growth", tmp_path).stderr
    for wrong in (("--contexts", "4000"), ("--rows", "129")):
        done = run("growth", bundle_of("tiny"), *wrong)
        assert done.returncode == 2 and "nothing to measure; rows are at most 128" in done.stderr
