"""What a backend gives: a loaded graph, called with named arrays."""

import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from .files import check_sizes, graph_files
from .manifest import Manifest

Array = np.ndarray
BACKENDS = ("onnx", "executorch")


class Graph(Protocol):
    def __call__(self, feeds: dict[str, Array]) -> dict[str, Array]:
        """Inputs by name -> outputs by name, as the graph's spec in the manifest declares them."""
        ...


Wrap = Callable[[str, Graph], Graph]  # a loaded graph and its name -> what is called in its place


def unwrapped(name: str, graph: Graph) -> Graph:
    return graph


def installed(backend: str) -> bool:
    """Whether the backend's package is there; it is not imported."""
    return importlib.util.find_spec({"onnx": "onnxruntime", "executorch": "executorch"}[backend]) is not None


def load_graphs(bundle: Path, manifest: Manifest, names: tuple[str, ...], backend: str, threads: int) -> list[Graph]:
    """As `load_graph`, in the order of names. onnxruntime's at once, for it packs their weights, each with one thread."""
    with ThreadPoolExecutor(len(names) if backend == "onnx" else 1) as pool:
        return list(pool.map(lambda name: load_graph(bundle, manifest, name, backend, threads), names))


def load_graph(bundle: Path, manifest: Manifest, name: str, backend: str, threads: int) -> Graph:
    """ValueError if a file of the graph is missing, has the wrong size or is refused by the backend."""
    check_sizes(bundle, manifest, graph_files(manifest, name, backend))
    spec = manifest.graphs[name]
    path = bundle / spec.files[backend]
    if backend == "executorch":
        from .graph_executorch import open_graph

        sha256, exported_with = manifest.files[spec.files[backend]].sha256, manifest.versions.get("executorch")
        return open_graph(path, spec, sha256, exported_with, bundle / "cache", threads)
    from .graph_onnx import OnnxGraph

    return OnnxGraph(path, spec, threads)
