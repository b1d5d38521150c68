"""ExecuTorch graphs at run time: results, shapes that do not fit, bad files, no torch, no compiler."""

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from runtime_py import graph_executorch
from runtime_py.files import sha256
from runtime_py.graph import load_graph
from runtime_py.graph_executorch import InputCheck, build_options, build_shim, load_shim, open_graph, package_folder
from runtime_py.manifest import FileSpec, GraphSpec, TensorSpec

from .executorch_net import (
    MAX_P,
    MAX_T,
    ROOT,
    SPEC,
    THREADS,
    VERSION,
    Made,
    check_child,
    check_results,
    child,
    eager,
    feeds_of,
    make,
    model_of,
    opened,
    packed_of,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    return make(tmp_path_factory.mktemp("made"))


@pytest.fixture
def bundle(made, tmp_path) -> Path:
    return shutil.copytree(made.bundle, tmp_path / "b")


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
    graph._inputs = lambda feeds: [feeds[put.name] for put in SPEC.inputs]  # not checked in Python
    for shape in ((MAX_P + 1, 64), (1, 65), (0, 64)):
        with pytest.raises(ValueError, match="ExecuTorch cannot run it"):
            graph({**made.feeds, "past": np.zeros(shape, np.float32)})


def test_sizes_with_a_factor():
    forms = [("float32", (3, 2)), ("float32", (12, 1))]
    check = InputCheck(Path("g.pte"), (TensorSpec("x", ("T", 2)), TensorSpec("m", ("4*T", 1))), forms)
    assert len(check({"x": np.zeros((2, 2)), "m": np.zeros((8, 1))})) == 2
    for rows in (6, 7, 12):
        with pytest.raises(ValueError, match=f"input m has a size of {rows}, expected 8"):
            check({"x": np.zeros((2, 2)), "m": np.zeros((rows, 1))})


def test_inputs_that_would_lose_their_values_by_their_type():
    """float64 becomes float32; what were no integers would become others."""
    specs = TensorSpec("x", ("T", 2)), TensorSpec("k", ("T", 2), "int8")
    check = InputCheck(Path("g.pte"), specs, [("float32", (3, 2)), ("int8", (3, 2))])
    x, k = check({"x": np.ones((2, 2)), "k": np.ones((2, 2), np.int8)})
    assert (x.dtype, k.dtype) == (np.float32, np.int8)
    with pytest.raises(ValueError, match="input k is float32, expected int8"):
        check({"x": x, "k": x})


def test_tensors_that_are_not_the_manifests(made, bundle):
    past = TensorSpec("past", ("P", 63)), TensorSpec("past", ("P", 64), "int8")
    for inputs in (SPEC.inputs[:2], *((*SPEC.inputs[:2], put) for put in past)):
        wrong = GraphSpec(SPEC.files, inputs, SPEC.outputs)
        with pytest.raises(ValueError, match="not those of the manifest"):
            open_graph(model_of(bundle), wrong, sha256(model_of(bundle)), VERSION, bundle / "cache", THREADS)


def test_threads_are_set_once(made, bundle):
    opened(bundle, made)
    with pytest.raises(ValueError, match=f"with {THREADS} threads and cannot change to 3"):
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
    manifest.files = {"executorch/net.pte": FileSpec("0" * 64, model.stat().st_size)}
    with pytest.raises(ValueError, match="sha256 is"):
        load_graph(bundle, manifest, "net", "executorch", THREADS)
    manifest.versions = {}
    with pytest.raises(ValueError, match="unknown version"):
        load_graph(bundle, manifest, "net", "executorch", THREADS)


def test_no_torch_and_no_words(made, bundle):
    load_shim()  # a first use compiles, in silence too
    (first,), (later,) = child(made, bundle), child(made, bundle)
    for seen in (first, later):
        check_child(seen, made)
        assert seen["stderr"] == ""
        assert not [name for name in seen["modules"] if name.startswith(("torch", "executorch"))]
        assert "libtorch" not in seen["maps"]
        assert "/net.pte" in seen["maps"] and str(packed_of(bundle)) in seen["maps"]


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
        "import sys; from tests.executorch_net import *\n"
        "path = Path(sys.argv[1])\n"
        "try: open_graph(path, SPEC, sha256(path), VERSION, path.parent / 'cache', 2)\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, model], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ExecuTorch cannot load it" in done.stdout and done.stdout.endswith("export the bundle again\n")


@pytest.mark.parametrize(
    ("env", "reason"), [({"PATH": "/nowhere"}, "no C++ compiler"), ({"CXX": "false"}, "false cannot compile")]
)
def test_without_compiler_the_python_package_runs_it(made, bundle, tmp_path, env, reason):
    (seen,) = child(made, bundle, env={"CXX": "", "XDG_CACHE_HOME": str(tmp_path / "home"), **env})
    check_child(seen, made)
    assert "torch" in seen["modules"] and not (bundle / "cache").exists()
    assert seen["stderr"].startswith(reason) and seen["stderr"].count("\n") == 1
    assert "ExecuTorch's Python package is used, which loads torch" in seen["stderr"]


def test_a_cache_folder_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OSError, match=r"home/gemma4-mtp cannot be written, set XDG_CACHE_HOME to a folder that can"):
        build_shim(package_folder())


def test_a_damaged_shim_is_compiled_again(made, bundle, tmp_path):
    """One that is cut short in the middle or has holes may load, and then end the process."""
    env = {"XDG_CACHE_HOME": str(tmp_path / "home")}
    child(made, bundle, env=env)
    (library,) = (tmp_path / "home").rglob("*.so")
    whole = library.read_bytes()
    for damaged in (b"\x7fELF", whole[:20000], whole[:20000] + bytes(len(whole) - 20000)):
        library.write_bytes(damaged)
        (seen,) = child(made, bundle, env=env)
        check_child(seen, made)
        assert seen["stderr"] == "" and "torch" not in seen["modules"]


def test_shim_compiles_without_warnings(tmp_path):
    command = [shutil.which("c++"), "-Werror", *build_options(package_folder(), tmp_path / "shim.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
