"""What is particular to .pte files: one delegate and nothing beside it, the head's rows in place, bounds, constants that
XNNPACK would mix up, and the command line on a bundle of the other backend or of both."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from executorch.exir._serialize._program import deserialize_pte_binary

from export import lower_executorch
from export.__main__ import main as export_main
from export.graphs import Drafter
from export.package import export_package
from export.quant import RECIPES, dequantize
from export.trace import trace
from export.weights import open_drafter
from runtime_py import manifest as contract
from runtime_py.embeddings import EmbeddingTable
from runtime_py.loading import choose_backend

from .edits import edit_tensors, error_line
from .pairs import PairShape, copy_pair
from .reference import eager_graphs
from .test_parity import DENSE_ODD

ROOT = Path(__file__).parent.parent
SMALL = PairShape(layers=4, period=2, shared=2, hidden=32, intermediate=64, per_layer=32, drafter_hidden=32, vocab=288)


def run(module: str, *arguments: object) -> subprocess.CompletedProcess:
    """In a process of its own: the number of threads is the process's."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=300)


@pytest.fixture(scope="module")
def both(pair_of, made_once) -> Path:
    """The small pair for both backends, at most 256 tokens on ExecuTorch."""

    def export(out: Path) -> None:
        target, drafter = pair_of(SMALL)
        export_package("tiny", str(target), str(drafter), "int8", out, False, ("onnx", "executorch"), 256)

    return made_once("both backends", export)


@pytest.mark.parametrize("recipe", RECIPES["executorch"])
def test_a_file_is_one_delegate_and_nothing_else(bundle_of, recipe):
    for path in sorted((bundle_of("tiny", recipe, "executorch") / "executorch").glob("*.pte")):
        (plan,) = deserialize_pte_binary(path.read_bytes()).program.execution_plan
        assert [delegate.id for delegate in plan.delegates] == ["XnnpackBackend"], path
        assert plan.operators == [], path


def test_an_operation_outside_the_delegate_is_refused(pair_of, tmp_path, monkeypatch):
    drafter = open_drafter(str(pair_of(SMALL)[1]))
    table = {**lower_executorch.TABLE, torch.ops.gemma4.gelu.default: lambda b, x: b(torch.ops.aten.erf.default, x)}
    monkeypatch.setattr(lower_executorch, "TABLE", table)
    module, program = trace(Drafter, drafter.config, RECIPES["executorch"]["fp32"], 256)
    with pytest.raises(ValueError, match=r"drafter: \d+ XNNPACK delegates, operations outside: .*erf"):
        lower_executorch.write(module, program, drafter, tmp_path, [], lambda stage: None)
    assert list(tmp_path.iterdir()) == []


def test_passes_that_are_left_out_find_nothing_to_do(pair_of, tmp_path, monkeypatch):
    drafter = open_drafter(str(pair_of(SMALL)[1]))

    def lower() -> bytes:
        traced = trace(Drafter, drafter.config, RECIPES["executorch"]["int8"], 256)
        lower_executorch.write(*traced, drafter, tmp_path, [], lambda stage: None)
        return (tmp_path / "drafter.pte").read_bytes()

    without = lower()
    monkeypatch.setattr(lower_executorch, "IDLE", ())
    monkeypatch.setattr(lower_executorch, "PASSES", (*lower_executorch.PASSES, "DimOrderOpsRevertPass"))
    monkeypatch.setattr(lower_executorch, "_views_to_copies", lower_executorch.ReplaceViewOpsWithViewCopyOpsPass.call)
    assert lower() == without


@pytest.mark.parametrize(("scale", "refused"), [(1.0, False), (2.0, True)])
def test_equal_bytes_of_another_form_are_refused(pair_of, tmp_path, scale, refused):
    """A weight twice another's has the same int8 values and other scales."""
    name = "model.layers.0.mlp.{}_proj.weight"
    pair = copy_pair(pair_of(SMALL), tmp_path / "pair")
    edit_tensors(pair[1], lambda tensors: tensors.update({name.format("up"): tensors[name.format("gate")] * scale}))
    drafter = open_drafter(str(pair[1]))
    module, program = trace(Drafter, drafter.config, RECIPES["executorch"]["int8"], 256)
    lower_executorch.decompose(program)
    if refused:
        with pytest.raises(ValueError, match=r"drafter: layers\.0\.mlp\..* and layers\.0\.mlp\..* equal bytes"):
            lower_executorch._fill(module, program, drafter, tmp_path, [])
    else:
        lower_executorch._fill(module, program, drafter, tmp_path, [])


@pytest.mark.parametrize("recipe", RECIPES["executorch"])
def test_the_host_maps_the_rows_of_the_head(bundle_of, pair_of, recipe):
    bundle = bundle_of("tiny", recipe, "executorch")
    manifest = contract.load(bundle)
    table = manifest.backends["executorch"].token_table
    assert table.data.file == "executorch/cross_decoder.pte"
    assert not (bundle / "embeddings/token.bin").exists()
    head = eager_graphs(pair_of("tiny"), recipe, "executorch")["cross_decoder"].module.lm_head
    weight = dequantize(head.weight, head.scale, head.spec.width(head.in_size)) if head.spec else head.weight
    ids = [0, 1, 7, 1023]
    assert np.array_equal(EmbeddingTable(bundle, table).rows(ids), weight[ids].numpy() * np.float32(table.multiplier))


def test_context_of_a_file_is_its_bound(both):
    assert contract.load(both).backends["executorch"].max_context_tokens == 256
    assert contract.load(both).backends["onnx"].max_context_tokens == SMALL.context
    prompt = ",".join(str(3 + i % 100) for i in range(250))
    arguments = ("generate", both, "--prompt-ids", prompt, "--max-new-tokens", 50, "--temperature", 0, "--json")
    result = json.loads(run("runtime_py", *arguments, "--backend", "executorch").stdout)
    assert len(result["token_ids"]) == 6 and result["stop_reason"] in ("context", "stop")
    assert len(json.loads(run("runtime_py", *arguments, "--backend", "onnx").stdout)["token_ids"]) > 6


def test_both_backends_behave_alike_on_the_command_line(both):
    found = {}
    for backend in ("onnx", "executorch"):
        arguments = (
            "--prompt-ids",
            "2,5,9",
            "--max-new-tokens",
            12,
            "--temperature",
            0,
            "--json",
            "--backend",
            backend,
        )
        done = run("runtime_py", "generate", both, *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        found[backend] = json.loads(done.stdout)
        assert found[backend]["backend"] == backend
    assert found["onnx"].keys() == found["executorch"].keys()
    info, check = run("runtime_py", "info", both), run("export", "check", both)
    assert (info.returncode, check.returncode) == (0, 0), check.stderr
    for backend in ("onnx", "executorch"):
        assert f"backend {backend}" in info.stdout
        assert f"row invariance on {backend}: every row has the same bits" in check.stdout


def test_auto_takes_what_the_bundle_holds_and_the_machine_has(both, bundle_of, monkeypatch):
    manifest = contract.load(both)
    assert choose_backend(manifest, "auto") == "executorch"
    assert choose_backend(contract.load(bundle_of("tiny")), "auto") == "onnx"
    monkeypatch.setattr("runtime_py.loading.installed", lambda name: name == "onnx")
    assert choose_backend(manifest, "auto") == "onnx"


def test_a_backend_that_the_bundle_lacks_is_named(bundle_of):
    with pytest.raises(ValueError, match="has files for onnx, not for executorch; export it with --backend all"):
        choose_backend(contract.load(bundle_of("tiny")), "executorch")


def test_a_damaged_target_file_is_one_line_and_a_damaged_drafter_turns_drafting_off(both, tmp_path):
    for graph, code in (("self_decoder", 2), ("drafter", 0)):
        bundle = Path(shutil.copytree(both, tmp_path / graph, ignore=shutil.ignore_patterns("cache")))
        path = bundle / f"executorch/{graph}.pte"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        done = run(
            "runtime_py", "generate", bundle, "--prompt-ids", "2,5", "--backend", "executorch", "--draft-tokens", 2
        )
        assert done.returncode == code, done.stderr
        assert str(path) in done.stderr.splitlines()[0]
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--context", "512"], "--context is for ExecuTorch's files"),
        (["--context", "5", "--backend", "executorch"], "--context 5 is too small"),
        (["--context", "9999", "--backend", "executorch"], "--context 9999 is above the model's own 2048; "),
    ],
)
def test_context_that_makes_no_sense(arguments, part, tmp_path, capsys):
    assert part in error_line(export_main, ["tiny", *arguments, "--out", tmp_path / "bundle"], capsys)


def test_eager_reference_holds_the_scales_of_the_file(pair_of):
    """4-bit scales are bfloat16 in a .pte: the canonical scales are already."""
    graphs = eager_graphs(pair_of(DENSE_ODD), "int4", "executorch")
    scales = [value for name, value in graphs["self_decoder"].module.named_buffers() if name.endswith(".scale")]
    assert scales and all(torch.equal(scale, scale.bfloat16().float()) for scale in scales)
