"""ExecuTorch graphs at run time: results, the packed weights' file, bad files, several processes, no compiler."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("executorch")

import torch
from torch import nn

from runtime_py import graph_executorch, packed_weights
from runtime_py.graph import load_graph
from runtime_py.graph_executorch import InputCheck, build_options, load_shim, open_graph, package_folder
from runtime_py.manifest import FileSpec, GraphSpec, TensorSpec, sha256

ROOT = Path(__file__).parents[1]
VERSION = "1.5.1"
MAX_T, MAX_P, THREADS = 8, 64, 2
SPEC = GraphSpec(
    {"executorch": "executorch/net.pte"},
    (TensorSpec("x", ("T", 64)), TensorSpec("y", ("T", 32)), TensorSpec("past", ("P", 64))),
    (TensorSpec("sum", ("T", 32)), TensorSpec("hidden", ("T", 128)), TensorSpec("rows", ("P", 32))),
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 128), nn.Linear(128, 32), nn.Linear(64, 32)

    def forward(self, x, y, past):
        hidden = torch.relu(self.a(x))
        return self.b(hidden) + y, hidden, self.c(past)


@dataclass(frozen=True)
class Made:
    """bundle: folder with executorch/net.pte, never loaded there. feeds: one call; results: of eager torch for it."""

    bundle: Path
    net: Net
    feeds: dict[str, np.ndarray]
    results: dict[str, np.ndarray]


def feeds_of(rows: int, past: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in
            (("x", (rows, 64)), ("y", (rows, 32)), ("past", (past, 64)))}  # fmt: skip


def eager(net: Net, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with torch.no_grad():
        out = net(*(torch.from_numpy(feeds[put.name]) for put in SPEC.inputs))
    return {put.name: tensor.numpy() for put, tensor in zip(SPEC.outputs, out, strict=True)}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass
    from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass

    torch.manual_seed(0)
    net, feeds = Net().eval(), feeds_of(3, 5)
    rows, past = torch.export.Dim("T", min=1, max=MAX_T), torch.export.Dim("P", min=1, max=MAX_P)
    example = tuple(torch.from_numpy(feeds[put.name]) for put in SPEC.inputs)
    program = torch.export.export(net, example, dynamic_shapes=({0: rows}, {0: rows}, {0: past}))
    edge = to_edge_transform_and_lower(
        {"forward": program},
        partitioner=[XnnpackPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )
    lowered = edge.to_executorch(
        ExecutorchBackendConfig(
            extract_delegate_segments=True,
            sym_shape_eval_pass=ConstraintBasedSymShapeEvalPass(),
            memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False),
        )
    )
    bundle = tmp_path_factory.mktemp("made")
    (bundle / "executorch").mkdir()
    (bundle / "executorch/net.pte").write_bytes(lowered.buffer)
    return Made(bundle, net, feeds, eager(net, feeds))


@pytest.fixture
def bundle(made, tmp_path) -> Path:
    return shutil.copytree(made.bundle, tmp_path / "b")


def model_of(bundle: Path) -> Path:
    return bundle / "executorch/net.pte"


def opened(bundle: Path, made: Made, threads: int = THREADS):
    return open_graph(model_of(bundle), SPEC, sha256(model_of(made.bundle)), VERSION, bundle / "cache", threads)


def check_results(out: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert list(out) == list(want)
    for name, values in want.items():
        np.testing.assert_allclose(out[name], values, atol=1e-5, rtol=1e-5, err_msg=name)


def packed_of(bundle: Path) -> Path:
    (packed,) = (bundle / "cache").glob("*.packed")
    return packed


def child(made: Made, bundle: Path, code: str = "", count: int = 1, **options) -> list[dict]:
    """Processes that load and run the graph at the same time -> what each saw. `code` runs before."""
    program = f"""
{code}
import json, sys
from pathlib import Path
import numpy as np
from runtime_py.graph_executorch import open_graph
from runtime_py.manifest import GraphSpec, TensorSpec
imported = sorted(sys.modules)
spec = {SPEC!r}
graphs = [open_graph(Path(sys.argv[1]), spec, sys.argv[2], {VERSION!r}, Path(sys.argv[3]), {THREADS}) for _ in range(2)]
feeds = {{name: np.array(values, np.float32) for name, values in json.loads(sys.argv[4]).items()}}
out = {{name: values.tolist() for name, values in graphs[1](feeds).items()}}
maps = Path("/proc/self/maps").read_text()
print(json.dumps({{"out": out, "imported": imported, "modules": sorted(sys.modules), "maps": maps}}))
"""
    feeds = json.dumps({name: values.tolist() for name, values in made.feeds.items()})
    command = [sys.executable, "-c", program, str(model_of(bundle)), sha256(model_of(made.bundle)), str(bundle / "cache"), feeds]  # fmt: skip
    options["env"] = {**os.environ, "PYTHONPATH": str(ROOT), **options.get("env", {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd="/", **pipes, **options) for _ in range(count)]
    texts = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, texts, strict=True):
        assert process.returncode == 0, (process.returncode, errors)
    return [{**json.loads(output), "stderr": errors} for output, errors in texts]


def check_child(seen: dict, made: Made) -> None:
    check_results({name: np.array(values) for name, values in seen["out"].items()}, made.results)


@pytest.mark.parametrize(("rows", "past"), [(1, 1), (2, 17), (MAX_T, MAX_P), (1, MAX_P), (MAX_T, 1)])
def test_results_are_those_of_eager_torch(made, bundle, rows, past):
    graph, feeds = opened(bundle, made), feeds_of(rows, past)
    check_results(graph(feeds), eager(made.net, feeds))
    again = feeds_of(1 + rows % MAX_T, past)
    check_results(graph(again), eager(made.net, again))


def test_inputs_and_outputs_are_aliased(made, bundle):
    graph = opened(bundle, made)
    arrays = graph._inputs(made.feeds)
    assert all(array is made.feeds[put.name] for array, put in zip(arrays, SPEC.inputs, strict=True))
    first = graph(made.feeds)
    second = graph(made.feeds)
    assert all(np.shares_memory(first[name], second[name]) for name in first)
    del graph
    gc.collect()
    check_results(second, made.results)  # the arrays own the memory, a graph that is gone leaves them


def test_inputs_of_another_layout_or_type(made, bundle):
    odd = {"x": np.asfortranarray(made.feeds["x"]), "y": made.feeds["y"].astype(np.float64), "past": made.feeds["past"]}
    odd["past"].flags.writeable = False
    check_results(opened(bundle, made)(odd), made.results)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": (9, 64), "y": (9, 32)}, "input x has a size of 9, allowed are 1 to 8"),
        ({"past": (65, 64)}, "input past has a size of 65, allowed are 1 to 64"),
        ({"past": (0, 64)}, "input past has a size of 0, allowed are 1 to 64"),
        ({"x": (3, 32)}, "input x has a size of 32, expected 64"),
        ({"x": (3, 65)}, "input x has a size of 65, expected 64"),
        ({"y": (4, 32)}, "input y has a size of 4, expected 3"),
        ({"y": (1, 32)}, "input y has a size of 1, expected 3"),
        ({"past": (64,)}, "input past has 1 dimensions, expected 2"),
        ({"y": None}, "input y is missing"),
        ({"z": (1, 1)}, "input z is unknown"),
    ],
)
def test_shapes_that_do_not_fit(made, bundle, shapes, message):
    graph = opened(bundle, made)
    feeds = {**made.feeds, **{name: shape and np.zeros(shape, np.float32) for name, shape in shapes.items()}}
    with pytest.raises(ValueError, match=message):
        graph({name: array for name, array in feeds.items() if array is not None})
    check_results(graph(made.feeds), made.results)


def test_shim_itself_refuses_sizes_out_of_bounds(made, bundle):
    graph = opened(bundle, made)
    graph._inputs = lambda feeds: [feeds[put.name] for put in SPEC.inputs]
    with pytest.raises(ValueError, match="ExecuTorch cannot run it"):
        graph({**made.feeds, "past": np.zeros((MAX_P + 1, 64), np.float32)})


def test_sizes_with_a_factor():
    check = InputCheck(Path("g.pte"), (TensorSpec("x", ("T", 2)), TensorSpec("m", ("4*T", 1))), [(3, 2), (12, 1)])
    assert len(check({"x": np.zeros((2, 2)), "m": np.zeros((8, 1))})) == 2
    for rows in (6, 7, 12):
        with pytest.raises(ValueError, match=f"input m has a size of {rows}, expected 8"):
            check({"x": np.zeros((2, 2)), "m": np.zeros((rows, 1))})


def test_tensors_that_are_not_the_manifests(made, bundle):
    for inputs in (SPEC.inputs[:2], (*SPEC.inputs[:2], TensorSpec("past", ("P", 63)))):
        wrong = GraphSpec(SPEC.files, inputs, SPEC.outputs)
        with pytest.raises(ValueError, match="not those of the manifest"):
            open_graph(model_of(bundle), wrong, sha256(model_of(bundle)), VERSION, bundle / "cache", THREADS)


def test_threads_are_set_once(made, bundle):
    opened(bundle, made)
    with pytest.raises(ValueError, match="with 2 threads and cannot change to 3"):
        opened(bundle, made, threads=3)


def test_package_missing_or_of_another_version(made, bundle, monkeypatch):
    with pytest.raises(ValueError, match=r"exported with executorch 1\.4\.0, 1\.5\.1.* is installed"):
        open_graph(model_of(bundle), SPEC, "", "1.4.0", bundle / "cache", THREADS)
    monkeypatch.setattr(graph_executorch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[executorch\]'"):
        opened(bundle, made)


def test_load_graph_takes_the_manifests_hash_and_version(made, bundle):
    model = model_of(bundle)
    files = {"executorch/net.pte": FileSpec(sha256(model), model.stat().st_size)}
    manifest = SimpleNamespace(graphs={"net": SPEC}, files=files, versions={"executorch": VERSION})
    check_results(load_graph(bundle, manifest, "net", "executorch", THREADS)(made.feeds), made.results)
    for wrong, message in (({"versions": {}}, "unknown version"), ({"files": {"executorch/net.pte": FileSpec("0" * 64, model.stat().st_size)}}, "sha256")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            load_graph(bundle, SimpleNamespace(**{**vars(manifest), **wrong}), "net", "executorch", THREADS)


def test_no_torch_and_no_words(made, bundle):
    load_shim()  # a first use compiles, in silence too
    (first,), (later,) = child(made, bundle), child(made, bundle)
    for seen in (first, later):
        check_child(seen, made)
        assert seen["stderr"] == ""
        assert not [name for name in seen["modules"] if name.startswith(("torch", "executorch"))]
        assert "libtorch" not in seen["maps"]
        assert "/net.pte" in seen["maps"] and str(packed_of(bundle)) in seen["maps"]


def test_next_load_maps_what_the_first_packed(made, bundle, monkeypatch):
    opened(bundle, made)
    before = {path.name: path.stat().st_mtime_ns for path in (bundle / "cache").iterdir()}
    assert len(before) == 2
    for name in ("_pack", "verify"):  # neither packed nor hashed again
        monkeypatch.setattr(packed_weights, name, None)
    check_results(opened(bundle, made)(made.feeds), made.results)
    assert {path.name: path.stat().st_mtime_ns for path in (bundle / "cache").iterdir()} == before


BAD_FILES = {
    "truncated": lambda data: data[: len(data) // 2],
    "flipped": lambda data: data[:-2000] + bytes([data[-2000] ^ 1]) + data[-1999:],
    "empty": lambda data: b"",
    "text": lambda data: b"version https://git-lfs.github.com/spec/v1\n" * 9,
}


@pytest.mark.parametrize("kind", BAD_FILES)
@pytest.mark.parametrize("loaded_before", [False, True])
def test_bad_files(made, bundle, kind, loaded_before):
    if loaded_before:
        opened(bundle, made)
    model = model_of(bundle)
    times = model.stat()
    model.write_bytes(BAD_FILES[kind](model.read_bytes()))
    os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ValueError, match=r"net\.pte: sha256 .* export the bundle again") as caught:
        opened(bundle, made)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["truncated", "empty", "text"])
def test_bad_files_whose_hash_is_right_are_refused_by_executorch(made, bundle, kind):
    model = model_of(bundle)
    model.write_bytes(BAD_FILES[kind](model.read_bytes()))
    code = (
        "import sys; from tests.test_executorch_runner import *\n"
        "path = Path(sys.argv[1])\n"
        "try: open_graph(path, SPEC, sha256(path), VERSION, path.parent / 'cache', 2)\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, model], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ExecuTorch cannot load it" in done.stdout and done.stdout.endswith("export the bundle again\n")


def _flip(packed: Path) -> None:
    times = packed.stat()
    data = bytearray(packed.read_bytes())
    data[100] ^= 255
    packed.write_bytes(data)
    os.utime(packed, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    "spoil",
    [
        _flip,
        lambda packed: os.truncate(packed, packed.stat().st_size // 2),
        lambda packed: packed.write_bytes(b""),
        lambda packed: packed.unlink(),
        lambda packed: Path(f"{packed}.json").unlink(),  # killed before packing was recorded
        lambda packed: Path(f"{packed}.json").write_text("[1"),
    ],
)
def test_doubtful_packed_file_is_made_again(made, bundle, spoil):
    opened(bundle, made)
    packed = packed_of(bundle)
    good, inode = packed.read_bytes(), packed.stat().st_ino
    keep = os.open(packed, os.O_RDONLY)  # so that its inode number is not used again
    spoil(packed)
    check_results(opened(bundle, made)(made.feeds), made.results)
    os.close(keep)
    assert packed_of(bundle).read_bytes() == good and packed_of(bundle).stat().st_ino != inode


def test_packed_files_of_other_keys_and_of_killed_processes_are_removed(made, bundle):
    cache = bundle / "cache"
    cache.mkdir()
    key = "0123456789abcdef"
    stale = [f"net-{key}-{key}.packed", f"net-{key}-{key}.packed.json", f"net-{key}-{key}.packed.x1_y"]
    others = [f"net-2-{key}-{key}.packed", "notes.txt"]
    for name in (*stale, *others):
        (cache / name).write_text("old")
    opened(bundle, made)
    left = {path.name for path in cache.iterdir()}
    assert left.isdisjoint(stale) and left.issuperset(others) and len(left) == 4


HALF = "import os, signal, sys; open(sys.argv[3], 'wb').write(bytes(5000)); "
KILL_PACKER = HALF + "os.kill(os.getpid(), signal.SIGBUS)"
KILL_BOTH = HALF + "os.kill(os.getppid(), signal.SIGKILL)"


def test_killed_while_packing(made, bundle):
    code = f"from runtime_py import packed_weights; packed_weights.PACK = {KILL_BOTH!r}"
    with pytest.raises(AssertionError, match=str(-signal.SIGKILL)):
        child(made, bundle, code)
    assert list((bundle / "cache").glob("*.packed.*")) and not list((bundle / "cache").glob("*.packed"))
    (seen,) = child(made, bundle)
    check_child(seen, made)
    assert str(packed_of(bundle)) in seen["maps"] and seen["stderr"] == ""
    assert len(list((bundle / "cache").iterdir())) == 2


def test_packing_that_dies_leaves_a_working_graph(made, bundle):
    (seen,) = child(made, bundle, f"from runtime_py import packed_weights; packed_weights.PACK = {KILL_PACKER!r}")
    check_child(seen, made)
    assert seen["stderr"].count("\n") == 1 and "the disk may be full; weights are packed in memory" in seen["stderr"]
    assert not list((bundle / "cache").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_disk_full_while_packing(made, bundle):
    (bundle / "cache").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "none", bundle / "cache"], capture_output=True)
    if mounted.returncode:
        pytest.skip("this system does not let root mount")
    try:
        (seen,) = child(made, bundle)
        check_child(seen, made)
        assert "the disk may be full; weights are packed in memory" in seen["stderr"]
        assert not list((bundle / "cache").iterdir())
    finally:
        subprocess.run(["umount", bundle / "cache"], check=True)


def test_bundle_that_cannot_be_written(made, bundle):
    (bundle / "cache").write_text("no folder")
    (seen,) = child(made, bundle)
    check_child(seen, made)
    assert seen["stderr"].count("\n") == 1 and "weights are packed in memory" in seen["stderr"]


def test_several_processes_at_once(made, bundle, tmp_path):
    for seen in child(
        made, bundle, count=3, env={"XDG_CACHE_HOME": str(tmp_path / "home")}
    ):  # the shim is built at once too
        check_child(seen, made)
        assert seen["stderr"] == "" and str(packed_of(bundle)) in seen["maps"]
    assert len(list((bundle / "cache").iterdir())) == 2
    assert len(list((tmp_path / "home/gemma4-mtp").iterdir())) == 1


@pytest.mark.parametrize(
    ("env", "reason"), [({"PATH": "/nowhere"}, "no C++ compiler"), ({"CXX": "false"}, "false cannot compile")]
)
def test_without_compiler_the_python_package_runs_it(made, bundle, tmp_path, env, reason):
    (seen,) = child(made, bundle, env={"CXX": "", "XDG_CACHE_HOME": str(tmp_path / "home"), **env})
    check_child(seen, made)
    assert "torch" in seen["modules"] and not (bundle / "cache").exists()
    assert seen["stderr"].startswith(reason) and seen["stderr"].count("\n") == 1
    assert "ExecuTorch's Python package is used, which loads torch" in seen["stderr"]


def test_shim_compiles_without_warnings(tmp_path):
    command = [shutil.which("c++"), "-Werror", *build_options(package_folder(), tmp_path / "shim.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
