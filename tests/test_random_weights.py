"""Random weights: the numbers, the bundle that says what it is, and what an export needs on disk before it writes."""

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from export import package, random_weights, space
from export.__main__ import main as export_main
from export.checkpoint import load_config
from export.package import export_pair
from export.random_weights import random_pair
from export.report import print_report
from export.space import needed_bytes, weight_bytes
from export.weights import open_drafter, open_target
from runtime_py import manifest as contract
from runtime_py.__main__ import main as runtime_main
from runtime_py.loading import load

from .conftest import PLE_BITS
from .edits import error_line
from .pairs import TINY, PairShape

SHAPE = PairShape(layers=4, period=2, shared=2, intermediate=64)
MARK = "random weights: text means nothing"
EMBEDDINGS = "embed_tokens_per_layer.weight"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def configs(pair_of):
    return [load_config(folder) for folder in pair_of(SHAPE)]


@pytest.fixture(scope="module")
def bundle(pair_of, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("random") / "bundle"
    with random_pair(*map(load_config, pair_of(SHAPE)), None) as pair:
        export_pair("e2b", *pair, "int8", out)
    return out


def test_numbers_depend_on_seed_and_place_alone(configs):
    read = []
    for seed in (5, 5, 6):
        with random_pair(*configs, None, seed) as pair:
            read.append([{name: w.checkpoint.read(name) for name in w.checkpoint.tensors} for w in pair])
    for first, same, other in zip(*read, strict=True):
        for name, tensor in first.items():
            assert torch.equal(tensor, same[name])
            assert not torch.equal(tensor, other[name])


@pytest.mark.parametrize("step", [1, 7, 100])
def test_pieces_are_those_of_the_whole(configs, step, monkeypatch):
    monkeypatch.setattr(random_weights, "BLOCK", 1000)
    with random_pair(*configs, None) as (target, _):
        checkpoint = target.checkpoint
        whole = checkpoint.read(EMBEDDINGS)
        assert whole.dtype is torch.bfloat16 and len(whole.unique(dim=0)) == len(whole)
        pieces = [checkpoint.read(EMBEDDINGS, i, i + step) for i in range(0, len(whole), step)]
        assert torch.equal(torch.cat(pieces), whole) and checkpoint.read(EMBEDDINGS, 3, 3).shape == (0, whole.shape[1])


def test_tensors_are_alike_normal_and_not_constant(configs):
    with random_pair(*configs, None) as (target, drafter):
        up = target.checkpoint.read("layers.2.mlp.up_proj.weight").float()
        assert abs(up.std() * math.sqrt(up.shape[1]) - 1) < 0.1 and len(up.unique(dim=0)) == len(up)
        assert not torch.equal(up, target.checkpoint.read("layers.3.mlp.up_proj.weight").float())
        order = drafter.checkpoint.read("masked_embedding.token_ordering")
        assert torch.equal(order.sort().values, torch.arange(SHAPE.vocab))


def test_the_bundle_says_that_its_text_means_nothing(bundle, capsys):
    manifest = contract.load(bundle)
    assert manifest.warning == MARK and manifest.checkpoints["target"].source == contract.RANDOM_WEIGHTS
    for main, arguments in (
        (runtime_main, ["info", bundle]),
        (runtime_main, ["generate", bundle, "--prompt", "Hi é", "--max-new-tokens", "8"]),
        (export_main, ["check", bundle]),
    ):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 0
        out, err = capsys.readouterr()
        assert [line for line in (out + err).splitlines() if MARK in line] in ([MARK], [f"warning: {MARK}"])
    print_report(package.Package(manifest, {}, ()), bundle)
    assert MARK in capsys.readouterr().out.splitlines()
    assert load(bundle, threads=1).off_reason is None


def test_a_checkpoint_has_no_mark(bundle_of):
    assert contract.load(bundle_of(SHAPE)).warning is None


def test_a_made_up_tokenizer_has_every_byte(bundle):
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    for text in ("Hi é", "日本語 \U0001f600"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id("<bos>") == 2 and tokenizer.token_to_id("<turn|>") == 106


@pytest.mark.parametrize(("given", "template"), [("target", True), ("target/tokenizer.json", True)])
def test_a_tokenizer_comes_with_its_template(configs, given, template):
    with random_pair(*configs, TINY / given) as (target, drafter):
        for name in ("tokenizer.json", "chat_template.jinja"):
            assert (target.checkpoint.folder / name).read_bytes() == (TINY / "target" / name).read_bytes()
        folders = target.checkpoint.folder, drafter.checkpoint.folder
    assert not any(folder.exists() for folder in folders)


# The disk.


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [("onnx", "int8"), ("onnx", "int4"), ("onnx", "small"), ("onnx", "fp32"), ("executorch", "int8")],
)
def test_what_is_needed_is_what_is_written(pair_of, bundle_of, backend, recipe):
    files = contract.load(bundle_of("tiny", recipe, backend)).files.items()
    suffixes = (".data", ".bin", ".pte")
    written = sum(spec.size_bytes for name, spec in files if name.endswith(suffixes))
    target, drafter = (
        open_it(str(folder)) for open_it, folder in zip((open_target, open_drafter), pair_of("tiny"), strict=True)
    )
    counted = weight_bytes(target, drafter, recipe, (backend,), PLE_BITS.get(recipe))
    assert 0.7 < written / counted < 1.5  # pages, and a .pte's own head, are much in so small a bundle
    assert needed_bytes(target, drafter, recipe, (backend,), PLE_BITS.get(recipe)) > sum(
        spec.size_bytes for _, spec in files
    )


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    pair_of, bundle_of, tmp_path, monkeypatch, capsys
):
    target, drafter = pair_of(SHAPE)
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 1_200_000))
    arguments = ["custom", "--checkpoint", target, "--drafter", drafter, "--out"]
    line = error_line(export_main, [*arguments, tmp_path / "new/bundle"], capsys)
    assert "1.2 MB are free" in line and "needs 1" in line and "--out" in line and list(tmp_path.iterdir()) == []
    old = shutil.copytree(bundle_of(SHAPE), tmp_path / "old")
    error_line(export_main, [*arguments, old, "--force"], capsys)
    assert load(old, threads=1).off_reason is None


def test_the_bar_counts_every_byte(pair_of, tmp_path, monkeypatch):
    bars = []

    class Bar(package.tqdm):
        def __init__(self, **options):
            super().__init__(**options | {"disable": False, "file": open(os.devnull, "w")})  # noqa: SIM115
            bars.append(self)

    monkeypatch.setattr(package, "tqdm", Bar)
    with random_pair(*map(load_config, pair_of(SHAPE)), None) as pair:
        export_pair("e2b", *pair, "int8", tmp_path / "bundle")
    (bar,) = bars
    assert bar.n == bar.total > 0 and bar.unit == "B"


INTERRUPTED = """
import os, runpy, signal, sys
from export import package
number = int(sys.argv.pop())
package.os.replace = lambda *names: os.kill(os.getpid(), number)
runpy.run_module("export", run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_leaves_nothing_that_loads(pair_of, tmp_path, number):
    target, drafter = pair_of(SHAPE)
    out = tmp_path / "bundle"
    options = ["custom", "--checkpoint", target, "--drafter", drafter, "--out", out, "--force", int(number)]
    command = [sys.executable, "-c", INTERRUPTED, *map(str, options)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert result.returncode == 128 + number, result.stderr
    assert [line for line in result.stderr.splitlines() if "interrupted" in line] == result.stderr.splitlines()[-1:]
    with pytest.raises(ValueError, match="export it again"), contextlib.closing(load(out, threads=1)):
        pass
