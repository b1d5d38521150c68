"""What loading a bundle costs, each way in turns: python -m benchmarks.loading BUNDLE.

onnx               as exported: the kernels lay weights out anew at every load, in memory of the process's own
onnx, prepacked    what they laid out is saved beside the weights (session.save_external_prepacked_constant_initializers)
                   and mapped
executorch, first  packs the weights into a file, then maps it
executorch         maps that file
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort
from tqdm import trange

from benchmarks.arguments import number
from benchmarks.turns import Engine, Loaded, Memory
from runtime_py import manifest as contract
from runtime_py.cpus import default_threads
from runtime_py.files import graph_files
from runtime_py.graph import installed
from runtime_py.manifest import FileSpec, Manifest

ROOT = Path(__file__).resolve().parent.parent
CONTEXT = 512
CALLS = 3  # of decode after a load
TARGET = ("self_decoder", "cross_decoder")


@dataclass(frozen=True)
class Load:
    """decode_s: median of a few steps of one row behind CONTEXT tokens; memory: after them."""

    loaded: Loaded
    memory: Memory
    decode_s: float


def linked(bundle: Path, manifest: Manifest, out: Path) -> Path:
    """The bundle again without its cache, files as links."""
    for name in (contract.MANIFEST_NAME, *manifest.files):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).symlink_to((bundle / name).absolute())
    return out


def prepacked(bundle: Path, manifest: Manifest, out: Path) -> Path:
    """The bundle again, with the target's weights in two forms: as exported, from which onnxruntime still tells whether the
    other form is this processor's, and as its kernels want them."""
    linked(bundle, manifest, out)
    graphs, files = dict(manifest.graphs), dict(manifest.files)
    for graph in TARGET:
        model = f"onnx/{graph}.prepacked.onnx"
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC  # makes constants of the scales
        options.optimized_model_filepath = str(out / model)
        for key, value in {
            "session.optimized_model_external_initializers_file_name": f"{Path(model).name}.data",
            "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
            "session.save_external_prepacked_constant_initializers": "1",
        }.items():
            options.add_session_config_entry(key, value)
        ort.InferenceSession(bundle / manifest.graphs[graph].files["onnx"], options, providers=["CPUExecutionProvider"])
        graphs[graph] = dataclasses.replace(
            manifest.graphs[graph], files={**manifest.graphs[graph].files, "onnx": model}
        )
        files |= {name: FileSpec("", (out / name).stat().st_size) for name in (model, f"{model}.data")}
    (out / contract.MANIFEST_NAME).unlink()
    text = contract.to_json(dataclasses.replace(manifest, graphs=graphs, files=files))
    (out / contract.MANIFEST_NAME).write_text(text, encoding="utf-8")
    return out


def load(bundle: Path, backend: str, threads: int, log: Path) -> Load:
    """In a process of its own, which has ended when this returns."""
    command = [sys.executable, "-m", "benchmarks.our_engine", bundle.absolute(), backend, CONTEXT, threads]
    with Engine(command, ROOT, log) as engine:
        decode_s = statistics.median(engine.seconds("decode") for _ in range(CALLS))
        return Load(engine.loaded, engine.memory(), decode_s)


def disk_bytes(bundle: Path, backend: str) -> int:
    """Of the files of the target's graphs and what was packed of them."""
    manifest = contract.load(bundle)
    names = {bundle / name for graph in TARGET for name in graph_files(manifest, graph, backend)}
    packed = (bundle / "cache").glob("*_decoder*.packed") if backend == "executorch" else ()
    return sum(path.stat().st_size for path in (*names, *packed))


def measure(bundle: Path, manifest: Manifest, backends: list[str], loads: int, threads: int) -> dict:
    """-> {way: (its loads, bytes on disk)}"""
    with tempfile.TemporaryDirectory(prefix="loading-", dir=bundle.absolute().parent) as name:
        folder, ways = Path(name), {}
        for backend in backends:
            ways[backend] = linked(bundle, manifest, folder / backend), backend
        if "onnx" in backends:
            ways["onnx, prepacked"] = prepacked(bundle, manifest, folder / "prepacked"), "onnx"
        found = {}
        if "executorch" in backends:
            found["executorch, first"] = [load(*ways["executorch"], threads, folder / "log")]
        for turn in trange(loads + 1, desc="loads", disable=None):  # the first reads the files from the disk
            for way, where in ways.items():
                one = load(*where, threads, folder / "log")
                found[way] = [*found.get(way, []), one] if turn else []
        return {way: (ones, disk_bytes(*ways[way.removesuffix(", first")])) for way, ones in found.items()}


def print_table(found: dict) -> None:
    """Medians; the peak of memory and what of it is the process's own."""
    print(
        f"{'way':18} {'load s':>7} {'first token s':>14} {'decode ms':>10} {'peak MB':>8} {'own MB':>7} {'on disk MB':>11}"
    )
    for way, (ones, disk) in found.items():
        middle = [
            statistics.median(take(one) for one in ones)
            for take in (
                lambda one: one.loaded.load_s,
                lambda one: one.loaded.first_token_s,
                lambda one: one.decode_s * 1e3,
                lambda one: one.memory.peak / 1e6,
                lambda one: one.memory.own / 1e6,
            )
        ]
        print("{:18} {:7.2f} {:14.2f} {:10.1f} {:8.0f} {:7.0f} {:11.0f}".format(way, *middle, disk / 1e6))


def parser() -> argparse.ArgumentParser:
    one = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__.splitlines()[0])
    one.add_argument("bundle", type=Path)
    one.add_argument("--loads", type=number, default=3)
    one.add_argument("--threads", type=number, default=default_threads())
    return one


def main(options: argparse.Namespace) -> int:
    try:
        manifest = contract.load(options.bundle)
        backends = [name for name in manifest.backends if installed(name)]
        print_table(measure(options.bundle, manifest, backends, options.loads, options.threads))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
