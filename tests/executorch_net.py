"""A small network as an ExecuTorch bundle, and processes that load and run it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("executorch")

import torch
from torch import nn

from runtime_py.files import sha256
from runtime_py.graph_executorch import ExecutorchGraph, open_graph
from runtime_py.manifest import GraphSpec, TensorSpec

from . import threads

ROOT = Path(__file__).parents[1]
VERSION = "1.5.1"
MAX_T, MAX_P = 8, 64
THREADS, CHILD_THREADS = threads.THREADS["executorch"], 2
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
    rng, sizes = np.random.default_rng(rows), {"T": rows, "P": past}
    shapes = {put.name: [sizes.get(size, size) for size in put.shape] for put in SPEC.inputs}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def eager(net: Net, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with torch.no_grad():
        out = net(*(torch.from_numpy(feeds[put.name]) for put in SPEC.inputs))
    return {put.name: tensor.numpy() for put, tensor in zip(SPEC.outputs, out, strict=True)}


@cache
def lowered() -> tuple[Net, bytes]:
    """The network and its .pte"""
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
    program = edge.to_executorch(
        ExecutorchBackendConfig(
            extract_delegate_segments=True,
            sym_shape_eval_pass=ConstraintBasedSymShapeEvalPass(),
            memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False),
        )
    )
    return net, program.buffer


def make(bundle: Path) -> Made:
    net, model = lowered()
    (bundle / "executorch").mkdir()
    model_of(bundle).write_bytes(model)
    feeds = feeds_of(3, 5)
    return Made(bundle, net, feeds, eager(net, feeds))


def model_of(bundle: Path) -> Path:
    return bundle / "executorch/net.pte"


def opened(bundle: Path, made: Made, threads: int = THREADS) -> ExecutorchGraph:
    return open_graph(model_of(bundle), SPEC, sha256(model_of(made.bundle)), VERSION, bundle / "cache", threads)


def check_results(out: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert list(out) == list(want)
    for name, values in want.items():
        np.testing.assert_allclose(out[name], values, atol=1e-5, rtol=1e-5, err_msg=name)


def packed_of(bundle: Path) -> Path:
    (packed,) = (bundle / "cache").glob("*.packed")
    return packed


CHILD = f"""
import json, sys
from pathlib import Path
import numpy as np
from runtime_py.graph_executorch import open_graph
from runtime_py.manifest import GraphSpec, TensorSpec
model, sha256, cache, feeds = sys.argv[1:]
graphs = [open_graph(Path(model), {SPEC!r}, sha256, {VERSION!r}, Path(cache), {CHILD_THREADS}) for _ in range(2)]
feeds = {{name: np.array(values, np.float32) for name, values in json.loads(feeds).items()}}
out = {{name: values.tolist() for name, values in graphs[1](feeds).items()}}
maps = Path("/proc/self/maps").read_text()
print(json.dumps({{"out": out, "modules": sorted(sys.modules), "maps": maps}}), flush=True)
sys.stdin.read()
"""


def child(made: Made, bundle: Path, code: str = "", count: int = 1, env: dict[str, str] | None = None) -> list[dict]:
    """Processes that load the graph at the same time, run it and all live until the last has -> what each saw and said.

    `code` runs before. AssertionError with the return code where one does not end well.
    """
    feeds = json.dumps({name: values.tolist() for name, values in made.feeds.items()})
    arguments = [model_of(bundle), sha256(model_of(made.bundle)), bundle / "cache", feeds]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    processes = [
        subprocess.Popen([sys.executable, "-c", code + CHILD, *arguments], cwd="/", env=environment, text=True, **pipes)
        for _ in range(count)
    ]
    lines = [process.stdout.readline() for process in processes]
    errors = [process.communicate()[1] for process in processes]
    for process, text in zip(processes, errors, strict=True):
        assert process.returncode == 0, (process.returncode, text)
    return [{**json.loads(line), "stderr": text} for line, text in zip(lines, errors, strict=True)]


def check_child(seen: dict, made: Made) -> None:
    check_results({name: np.array(values) for name, values in seen["out"].items()}, made.results)
