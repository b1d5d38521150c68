"""Graphs on onnxruntime, CPU."""

from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort

from .manifest import GraphSpec

Array = np.ndarray
TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "int8": "tensor(int8)"}


class OnnxGraph:
    """One .onnx file with its external data. threads is process-wide: the first graph loaded sets it."""

    def __init__(self, path: Path, spec: GraphSpec, threads: int):
        _use_global_pool(threads)
        options = ort.SessionOptions()
        options.log_severity_level = 4  # errors come as exceptions too
        options.use_per_session_threads = False  # two pools that spin on the same cores halve the speed
        options.enable_mem_pattern = False  # shapes change with every step, a pattern would never repeat
        if any(put.dtype != "float32" for put in spec.inputs):
            _cast_late(options)
        self._path = path
        try:
            self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise ValueError(f"{path}: onnxruntime cannot load it ({_short(error)}); export the bundle again") from None
        self._outputs = [output.name for output in spec.outputs]
        found = (*self._session.get_inputs(), *self._session.get_outputs())
        wanted = [(put.name, TYPES[put.dtype], put.shape) for put in (*spec.inputs, *spec.outputs)]
        if [(put.name, put.type, tuple(put.shape)) for put in found] != wanted:
            raise ValueError(f"{path}: inputs and outputs are not those of the manifest; export the bundle again")

    def __call__(self, feeds: dict[str, Array]) -> dict[str, Array]:
        try:
            return dict(zip(self._outputs, self._session.run(self._outputs, feeds), strict=True))
        except Exception as error:
            raise ValueError(
                f"{self._path}: onnxruntime cannot run it ({_short(error)}); export the bundle again"
            ) from None


def _cast_late(options: ort.SessionOptions) -> None:
    """Past rows that are narrower than float32 are cast in the graph, layer by layer, which takes memory as the text grows:
    each when it is needed, not all of them first, and in memory that the graphs have in common."""
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.add_session_config_entry("session.use_env_allocators", "1")
    _share_arena()


@cache
def _share_arena() -> None:
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, None)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


_pool_threads: list[int] = []


def _use_global_pool(threads: int) -> None:
    if not _pool_threads:
        ort.set_global_thread_pool_sizes(threads, 1)
        _pool_threads.append(threads)
