"""Graphs on onnxruntime, CPU."""

import ctypes
import sys
from functools import cache
from pathlib import Path
from threading import Lock

import numpy as np
import onnxruntime as ort

from .manifest import GraphSpec

Array = np.ndarray
MADV_DONTNEED = 4
_environment_lock = Lock()  # graphs are loaded in several threads
TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "int8": "tensor(int8)"}


class OnnxGraph:
    """One .onnx file with its external data. threads is process-wide: the first graph loaded sets it."""

    def __init__(self, path: Path, spec: GraphSpec, threads: int):
        with _environment_lock:
            _use_global_pool(threads)
            _share_arena()
        options = ort.SessionOptions()
        options.log_severity_level = 4  # errors come as exceptions too
        options.use_per_session_threads = False  # two pools that spin on the same cores halve the speed
        options.add_session_config_entry("session.use_env_allocators", "1")  # work space of one graph serves the others
        options.enable_mem_pattern = False  # shapes change with every step, a pattern would never repeat
        if any(put.dtype != "float32" for put in spec.inputs):
            # Past rows are cast in the graph: each when it is needed, not all of them first, which takes memory as the text grows
            options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        self._path = path
        try:
            self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise ValueError(f"{path}: onnxruntime cannot load it ({_short(error)}); export the bundle again") from None
        _drop_pages(path.with_suffix(".onnx.data"))
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


def _drop_pages(data: Path) -> None:
    """What was read of a mapped file leaves the process' memory, for packed weights stand in its place. What is read again
    comes from the page cache. Elsewhere than on Linux nothing is done."""
    if sys.platform != "linux":
        return
    system, file = ctypes.CDLL(None), f" {data.resolve()}"
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.endswith(file):
            start, end = (int(address, 16) for address in line.split(maxsplit=1)[0].split("-"))
            system.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)


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
