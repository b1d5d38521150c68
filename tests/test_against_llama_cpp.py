"""benchmarks.against_llama_cpp: what it makes of measurements, the processes that it measures, and where llama.cpp is built a
run of the tiny pair's size from the GGUF writer to the table."""

import dataclasses
import sys
from pathlib import Path

import pytest

from benchmarks import against_llama_cpp, llama_cpp_build
from benchmarks.against_llama_cpp import Speculation, call_names, geometry, gguf_bytes, parse_speculation
from benchmarks.llama_cpp_report import LLAMA, Measured, lines, ratios, spread
from benchmarks.turns import Engine, Loaded, Memory
from runtime_py import manifest as contract

from .command_line import ROOT
from .pairs import TINY

SAID = """\
0.00.848.470 I encoded  128 tokens in    0.039 seconds, speed: 3260.980 t/s
0.00.848.486 I decoded   25 tokens in    0.529 seconds, speed:   47.296 t/s
0.00.848.487 I n_draft   = 3
0.00.848.487 I n_predict = 25
0.00.848.488 I n_drafted = 66
0.00.848.488 I n_accept  = 2
"""
MADE = """\
import sys, time
from benchmarks.turns import serve
def load():
    print("a library's own words")
    if "fail" in sys.argv:
        raise ValueError("no such\\nmodel")
    time.sleep(0.05)
def call():
    if "die" in sys.argv:
        sys.exit("out of paper")
    time.sleep(0.02)
sys.exit(serve(load, lambda _: time.sleep(0.05), lambda _: {"decode": call}))
"""


def built() -> str | None:
    """Why there is no llama.cpp to run; None where there is."""
    try:
        llama_cpp_build.find(llama_cpp_build.FOLDER)
    except ValueError as error:
        return str(error)
    return None


def engine(folder: Path, *arguments: str) -> Engine:
    return Engine([sys.executable, "-c", MADE, *arguments], ROOT, folder / "log")


def test_an_engine_answers_what_its_calls_took(tmp_path):
    with engine(tmp_path) as made:
        assert made.loaded.load_s >= 0.05 and made.loaded.load_s + 0.05 <= made.loaded.first_token_s
        assert 0.02 <= made.seconds("decode") < 1
        memory = made.memory()
        assert memory.peak >= memory.own > 0 and memory.mapped > 0
    assert (tmp_path / "log").read_text() == "a library's own words\n"


def test_an_engine_that_fails_says_why(tmp_path):
    with pytest.raises(ValueError, match="no such model"):
        engine(tmp_path, "fail")
    with engine(tmp_path, "die") as made, pytest.raises(ValueError, match=r"ended [(]out of paper[)]"):
        made.seconds("decode")


def test_rounds_of_llama_cpp_are_its_tokens_less_the_accepted_drafts():
    assert parse_speculation(SAID) == Speculation(rounds=23, seconds=0.529, drafted=66, accepted=2)
    for cut in ("decoded", "n_drafted", "n_accept"):
        assert parse_speculation("".join(line for line in SAID.splitlines(True) if cut not in line)) is None


def test_ratios_are_of_one_round():
    found = ratios([2, 8, 3], [1, 2, 3])
    assert (found.low, found.median, found.high) == (1, 2, 4)
    assert str(spread([1.0, 2.0, 4.0])) == "2.00 (1.00 to 4.00)"


def measured(factor: float) -> Measured:
    seconds = {name: [factor * (i + 1), factor * (i + 1)] for i, name in enumerate(call_names(512))}
    loaded = (Loaded(factor, 2 * factor),)
    return Measured(loaded, Memory(int(1e9 * factor), 1, 1), seconds, [factor * 5], int(1e8 * factor))


def test_a_ratio_over_1_says_that_ours_is_faster_or_smaller():
    told = lines({LLAMA: measured(3.0), "onnx": measured(2.0)})
    assert "prefill 512" in told[1] and "3000.0 (3000.0 to 3000.0) ms" in told[1]
    last = told[-1]
    assert last.startswith("llama.cpp / onnx: prefill 512 1.50 (1.50 to 1.50), decode 1.50")
    assert last.endswith("first token 1.50 (1.50 to 1.50), peak memory 1.50, files 1.50")
    own = next(line for line in told if line.startswith("onnx, in its own decodes"))
    assert "verify 2 1.50 (1.50 to 1.50)" in own and "draft 3 2.50" in own


def test_the_geometry_is_the_bundles(bundle_of):
    manifest = contract.load(bundle_of("tiny"))
    pair = geometry(manifest, TINY / "target", TINY / "assistant")
    assert [layer["head_dim"] for layer in pair["target"]["layers"]] == [32, 32, 32, 64] * 2
    with pytest.raises(ValueError, match="no size that is known; name the pair with --checkpoint and --drafter"):
        geometry(manifest, None, None)
    with pytest.raises(ValueError, match="hidden_size is 128 in the bundle, 1536 in the pair"):
        geometry(dataclasses.replace(manifest, name="e2b"), None, None)


def test_bad_input_is_exit_code_2(bundle_of, tmp_path, capsys):
    assert against_llama_cpp.main([str(bundle_of("tiny")), "--llama-cpp", str(tmp_path)]) == 2
    assert "holds no llama.cpp of llama-cpp-python 0.3.36; run python -m" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        against_llama_cpp.main(["bundle", "--rounds", "0"])


@pytest.mark.skipif(built() is not None, reason=str(built()))
@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_a_run_from_the_writer_to_the_table(bundle_of, tmp_path, capsys, recipe):
    pair = ["--checkpoint", str(TINY / "target"), "--drafter", str(TINY / "assistant"), "--gguf", str(tmp_path)]
    counts = ["--context", "128", "--rounds", "2", "--loads", "1", "--draft-runs", "1", "--threads", "1"]
    assert against_llama_cpp.main([str(bundle_of("tiny", recipe)), *pair, *counts]) == 0
    told = capsys.readouterr().out.splitlines()
    name = {"int8": "Q8_0", "int4": "Q4_0"}[recipe]
    assert f"{recipe} and llama.cpp {name}" in told[0]
    assert [line[:12].strip() for line in told[2:9]] == call_names(128)
    assert told[9].startswith("draft 3") and told[-1].startswith("llama.cpp / onnx: prefill 128 ")
    target = (tmp_path / f"target-{name}.gguf").stat().st_size
    expected = gguf_bytes(geometry(contract.load(bundle_of("tiny")), TINY / "target", TINY / "assistant"), name)
    assert 0.8 < expected / target < 1.3  # the drafter is in it, names and norms are not
