"""Bundles: whole or not loadable, the same bytes from the same input, true to their manifest; `export check` passes on
good ones and names what is wrong with others; weights past 4 GiB are read."""

import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from export import lower_onnx, package
from export.__main__ import main as export_main
from export.embeddings import shared_table
from export.graphs import CrossDecoder
from export.package import prepare_folder
from export.quant import RECIPES
from export.trace import trace
from export.weights import open_target
from runtime_py import manifest as contract
from runtime_py.__main__ import main as runtime_main
from runtime_py.embeddings import EmbeddingTable
from runtime_py.files import check_hashes, sha256
from runtime_py.graph_onnx import OnnxGraph
from runtime_py.loading import load

from .edits import edit_json, error_line
from .pairs import PairShape, copy_pair

SHAPE = PairShape(layers=4, period=2, shared=2, intermediate=64)  # the fewest layers that hold every kind
FILES = (
    *(f"onnx/{graph}.onnx{end}" for graph in contract.GRAPHS for end in ("", ".data")),
    *(f"embeddings/drafter_{name}.bin" for name in ("centroids", "head", "head.scales", "token_ordering")),
    "embeddings/per_layer.bin",
    "embeddings/per_layer.scales.bin",
    "tokenizer.json",
)


@pytest.fixture
def bundle(bundle_of, tmp_path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(bundle_of(SHAPE), tmp_path / "bundle"))


def export_arguments(pair: tuple[Path, Path], out: Path, *more: str) -> list[str]:
    return ["tiny", "--checkpoint", str(pair[0]), "--drafter", str(pair[1]), "--out", str(out), *more]


def assert_refused(bundle: Path, capsys) -> None:
    """Neither a program nor a command line loads it, and each says so in one line."""
    with pytest.raises(ValueError, match="export it again"):
        load(bundle, threads=1)
    assert str(bundle) in error_line(runtime_main, ["info", bundle], capsys)
    assert str(bundle) in error_line(export_main, ["check", bundle], capsys)


# What an export writes.


def test_same_input_gives_the_same_bytes(pair_of, bundle_of, tmp_path):
    """Another process, another hash seed, another folder; and its report."""
    out = tmp_path / "a folder"
    command = [sys.executable, "-m", "export", *export_arguments(pair_of(SHAPE), out)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "1"})
    assert result.returncode == 0 and result.stderr == "", result.stderr
    first, second = bundle_of(SHAPE), out
    names = sorted(path.relative_to(first).as_posix() for path in first.rglob("*") if path.is_file())
    assert names == sorted([*FILES, "manifest.json"])
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    for name in FILES:
        assert f"{(out / name).stat().st_size / 1e6:10.3f}  {name}\n" in result.stdout
    assert f"python -m runtime_py generate '{out}' --prompt" in result.stdout.splitlines()[-1]


def test_the_tokenizer_is_the_checkpoints_without_white_space(pair_of, bundle_of):
    source, written = (folder / "tokenizer.json" for folder in (pair_of("tiny")[0], bundle_of("tiny")))
    tokenizer = json.loads(written.read_bytes())
    assert tokenizer == json.loads(source.read_bytes())
    assert written.read_text(encoding="utf-8") == json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("recipe", ["int8", "small"])
def test_manifest_is_true(bundle_of, recipe):
    bundle = bundle_of(SHAPE, recipe)
    manifest = contract.load(bundle)
    assert sorted(manifest.files) == sorted(FILES)
    check_hashes(bundle, manifest, manifest.files)
    for name, spec in manifest.graphs.items():
        graph = onnx.load(bundle / spec.files["onnx"], load_external_data=False).graph
        for values, specs in ((graph.input, spec.inputs), (graph.output, spec.outputs)):
            assert [value.name for value in values] == [spec.name for spec in specs], name
            sizes = [[d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] for value in values]
            assert sizes == [list(spec.shape) for spec in specs], name
            assert {value.type.tensor_type.elem_type for value in values} == {onnx.TensorProto.FLOAT}, name


@pytest.mark.parametrize("recipe", RECIPES["onnx"])
def test_check_passes(bundle_of, recipe, capsys):
    assert export_main(["check", str(bundle_of(SHAPE, recipe))]) == 0
    lines = capsys.readouterr().out.splitlines()
    for word in ("manifest", "hashes", *contract.GRAPHS, "pair", "row invariance"):
        assert any(line.startswith(word) for line in lines), word
    if recipe != "fp32":
        assert lines[-1].endswith("every row has the same bits alone and in blocks (which the manifest promises)")


@pytest.mark.parametrize("context", [17, 130, 176])
def test_check_passes_where_the_context_ends_near_the_first_chunk(bundle_of, context, capsys):
    shape = dataclasses.replace(SHAPE, context=context)
    assert export_main(["check", str(bundle_of(shape))]) == 0
    assert "every row has the same bits" in capsys.readouterr().out


# An export that does not finish, and folders that it must not touch.

KILLED = """
import os, signal, sys
from export import package
from export.__main__ import main
package.os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
main(sys.argv[1:])
"""


def test_a_killed_export_leaves_nothing_that_loads(pair_of, bundle_of, tmp_path, capsys):
    """Killed when all but the manifest's name is in place; then --force makes it good."""
    command = [sys.executable, "-c", KILLED, *export_arguments(pair_of(SHAPE), tmp_path / "bundle")]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    left = {path.relative_to(tmp_path / "bundle").as_posix() for path in (tmp_path / "bundle").rglob("*")}
    assert {*FILES, "manifest.json.tmp"} <= left and "manifest.json" not in left
    assert_refused(tmp_path / "bundle", capsys)
    prepare_folder(tmp_path / "bundle", True, ("onnx",))
    assert {path.name for path in (tmp_path / "bundle").iterdir()} == {"onnx", "embeddings"}


def test_an_export_that_replaces_a_bundle_and_fails_leaves_nothing_that_loads(pair_of, bundle, monkeypatch, capsys):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lower_onnx, "write", fail)
    arguments = export_arguments(pair_of(SHAPE), bundle, "--force")
    assert "No space left on device" in error_line(export_main, arguments, capsys)
    assert_refused(bundle, capsys)


def test_a_full_disk_is_one_line(pair_of, tmp_path, capsys):
    """No file may grow past 100 kB."""
    arguments, limits = export_arguments(pair_of(SHAPE), tmp_path / "bundle"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        line = error_line(export_main, arguments, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in line and not (tmp_path / "bundle/manifest.json").exists()


def test_an_existing_bundle_is_replaced_only_by_force(pair_of, bundle, capsys):
    before = (bundle / "manifest.json").read_bytes()
    assert "--force" in error_line(export_main, export_arguments(pair_of(SHAPE), bundle), capsys)
    assert (bundle / "manifest.json").read_bytes() == before
    (bundle / "onnx/stale.onnx").write_bytes(b"of another export")
    prepare_folder(bundle, True, ("onnx",))
    assert [path for path in bundle.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "name", ["notes.txt", "cache/notes.txt", "onnx/my_model.bin", "embeddings/sub/table.bin", "onnx/.hidden"]
)
def test_a_folder_with_other_files_is_never_replaced(pair_of, bundle, name, capsys):
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).write_text("dear")
    for force in ([], ["--force"]):
        assert repr(name) in error_line(export_main, export_arguments(pair_of(SHAPE), bundle, *force), capsys)
    assert (bundle / name).read_text() == "dear" and contract.load(bundle)


def test_two_exports_do_not_share_a_folder(pair_of, bundle, capsys):
    with package._alone_in(bundle):
        line = error_line(export_main, export_arguments(pair_of(SHAPE), bundle, "--force"), capsys)
    assert f"{bundle}: another export is writing there" in line and contract.load(bundle)


def test_a_linked_folder_is_unlinked_and_not_emptied(bundle, tmp_path):
    (bundle / "onnx").rename(tmp_path / "elsewhere")
    (bundle / "onnx").symlink_to(tmp_path / "elsewhere")
    prepare_folder(bundle, True, ("onnx",))
    assert (tmp_path / "elsewhere/drafter.onnx").exists() and list((bundle / "onnx").iterdir()) == []


def test_a_folder_that_cannot_be_written(pair_of, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file/bundle", Path("/proc/bundle")):
        line = error_line(export_main, export_arguments(pair_of(SHAPE), out), capsys)
        assert f"{out}: cannot be written" in line and "--out" in line
        assert ("(it is a file)" in line) == (out == tmp_path / "file")


# `export check` on damaged bundles.


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_check_names_every_damaged_file(bundle, capsys):
    for name in FILES:
        whole = (bundle / name).read_bytes()
        for damage in (flip, cut, Path.unlink):
            damage(bundle / name)
            assert f"{bundle / name}:" in error_line(export_main, ["check", bundle], capsys)
            (bundle / name).write_bytes(whole)
    assert export_main(["check", str(bundle)]) == 0


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"graphs/drafter/inputs/0/name": "pear"}, ["drafter.onnx", "declares pair float32[1, 128]", "pear float32[1, 128]"]),
        ({"graphs/drafter/inputs/0/shape/1": 64}, ["drafter.onnx", "pair float32[1, 128]", "pair float32[1, 64]"]),
        ({"graphs/cross_decoder/outputs": []}, ["cross_decoder.onnx", "declares logits", "None"]),
        ({"graphs/self_decoder/outputs/0/shape/0": "R"}, ["self_decoder.onnx", "x float32['T', 64]", "x float32['R', 64]"]),
        ({"graphs/drafter/files/onnx": "onnx/self_decoder.onnx"}, ["self_decoder.onnx", "declares embeds"]),
        ({"graphs/drafter/files/onnx": "tokenizer.json"}, ["tokenizer.json: no ONNX model"]),
        ({"target/query_heads": 3}, ["self_decoder: mask_tail_full is float32['4*T', 128]", "['3*T', 128]"]),
        ({"drafter/layer_types/0": "chunked"}, ["layer type 'chunked' has no donor", "sliding, full"]),
        ({"drafter/hidden_size": 32}, ["drafter.centroid_head: 32 x 16 tokens"]),
        ({"drafter/centroid_head": None}, ["drafter.centroid_head: none", "no logits"]),
        ({"drafter/centroid_head/top_k": 64}, ["centroid_head.top_k: 64 of 32"]),
        ({"drafter/centroid_head/table/data/shape/0": 511, "drafter/centroid_head/table/scales/shape/0": 511}, ["511 rows", "512"]),
        ({"drafter/centroid_head/token_ordering/file": "embeddings/drafter_centroids.bin"}, ["no permutation of 0..511"]),
    ],
)  # fmt: skip
def test_check_names_what_does_not_fit(bundle, changes, parts, capsys):
    edit_json(bundle / "manifest.json", changes)
    line = error_line(export_main, ["check", bundle], capsys)
    assert all(part in line for part in parts), line


def test_check_refuses_the_drafter_of_another_bundle(bundle_of, bundle, capsys):
    """Head of the same size, other weights: only the hashes tell."""
    other = bundle_of(PairShape())
    shutil.copyfile(other / "embeddings/drafter_head.bin", bundle / "embeddings/drafter_head.bin")
    assert "drafter_head.bin: sha256" in error_line(export_main, ["check", bundle], capsys)


def test_check_refuses_weights_outside_their_file(bundle, capsys):
    path = bundle / "onnx/drafter.onnx"
    model = onnx.load(path, load_external_data=False)
    size = (bundle / "onnx/drafter.onnx.data").stat().st_size
    model.graph.initializer[0].external_data[1].value = str(size)
    path.write_bytes(model.SerializeToString())
    restate(bundle, "onnx/drafter.onnx")
    assert f"{path}: {model.graph.initializer[0].name} ends at byte" in error_line(
        export_main, ["check", bundle], capsys
    )


def restate(bundle: Path, name: str) -> None:
    """Hash and size of a changed file into the manifest."""
    data = json.loads((bundle / "manifest.json").read_text())
    data["files"][name] = {"sha256": sha256(bundle / name), "size_bytes": (bundle / name).stat().st_size}
    (bundle / "manifest.json").write_text(json.dumps(data))


class Leaky:
    """A target whose row 0 sees how many rows come with it."""

    def __init__(self, target):
        self._target, self.spec, self.max_context_tokens = target, target.spec, target.max_context_tokens
        self.new_cache, self.append = target.new_cache, target.append

    def forward(self, cache, ids):
        out = self._target.forward(cache, ids)
        out.hidden[0, 0] += len(ids) == 5
        return out


@pytest.mark.parametrize("stated", [True, False])
def test_check_measures_row_invariance(bundle, stated, monkeypatch, capsys):
    from export import check

    def load_leaky(*arguments, **options):
        pair = load(*arguments, **options)
        return dataclasses.replace(pair, target=Leaky(pair.target))

    monkeypatch.setattr(check, "load", load_leaky)
    edit_json(bundle / "manifest.json", {"backends/onnx/quantization/row_invariant": stated})
    if stated:
        line = error_line(export_main, ["check", bundle], capsys)
        assert "rows differ from rows alone at T = 5" in line and "near ties" in line
    else:
        assert export_main(["check", str(bundle)]) == 0
        assert "rows differ from rows alone at T = 5 (which the manifest does not promise)" in capsys.readouterr().out


# Large files.


def test_weights_past_4_gib(pair_of, bundle_of, tmp_path, monkeypatch):
    """The same weights behind a hole of 4 GiB: graph and shared token table give the same numbers."""
    ordinary = bundle_of(SHAPE)
    hole, place = (4 << 30) + lower_onnx.PAGE_BYTES, lower_onnx._place

    def place_behind_hole(model, data):
        placement = place(model, data)
        for name, (offset, dtype, shape) in placement.items():
            value = model.graph.initializers[name]
            value.const_value = ir.ExternalTensor(
                data.name, offset + hole, value.const_value.length, value.dtype,
                shape=value.shape, name=name, base_dir=data.parent,
            )  # fmt: skip
            placement[name] = offset + hole, dtype, shape
        return placement

    monkeypatch.setattr(lower_onnx, "_place", place_behind_hole)
    target = open_target(str(pair_of(SHAPE)[0]))
    module, program = trace(CrossDecoder, target.config, RECIPES["onnx"]["int8"], target.config.max_context_tokens)
    (tmp_path / "onnx").mkdir()
    placement = lower_onnx.write(module, program, target, tmp_path / "onnx", [], lambda stage: None)
    data = tmp_path / "onnx/cross_decoder.onnx.data"
    assert data.stat().st_size > 4 << 30 > data.stat().st_blocks * 512

    manifest = contract.load(ordinary)
    spec = manifest.graphs["cross_decoder"]
    sizes = {"T": 3, "4*T": 12, "R": 2, "4*R": 8, "P_sliding": 5, "P_full": 7}
    random = np.random.default_rng(0)
    feeds = {
        put.name: random.standard_normal([sizes.get(size, size) for size in put.shape], np.float32)
        for put in spec.inputs
    }
    far, near = (OnnxGraph(folder / spec.files["onnx"], spec, 1)(feeds) for folder in (tmp_path, ordinary))
    assert all(np.array_equal(far[name], near[name]) for name in near)

    table = shared_table(
        placement,
        spec.files["onnx"] + ".data",
        RECIPES["onnx"]["int8"].spec("cross_decoder.lm_head", SHAPE.hidden),
        SHAPE.hidden,
        8.0,
    )
    assert table.data.offset_bytes > 4 << 30 and table.scales.offset_bytes > 4 << 30
    ids = [0, 5, SHAPE.vocab - 1]
    ordinary_rows = EmbeddingTable(ordinary, manifest.backends["onnx"].token_table).rows(ids)
    assert np.array_equal(EmbeddingTable(tmp_path, table).rows(ids), ordinary_rows)


def test_a_missing_package_is_named(tmp_path):
    code = "import sys; sys.modules['tqdm'] = None; from export.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "tiny", "--out", str(tmp_path / "bundle")]
    result = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert result.returncode == 2 and "tqdm" in result.stderr and "pip install" in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(("name", "value"), [("temperature", "hot"), ("top_k", 64.0), ("top_p", "all")])
def test_bad_sampling_defaults_are_named_before_anything_is_written(pair_of, tmp_path, name, value):
    target, drafter = copy_pair(pair_of(PairShape()), tmp_path)
    edit_json(target / "generation_config.json", {name: value})
    with pytest.raises(ValueError, match=name):
        package.export_package("tiny", str(target), str(drafter), "int8", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
