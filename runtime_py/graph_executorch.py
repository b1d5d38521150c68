"""Graphs on ExecuTorch with XNNPACK: a small C shim over the executorch package's own libraries, driven by ctypes.

No torch in the process. The shim (executorch_shim.cpp) is compiled once on first use and kept in the user's cache
folder. Where it cannot be built the ExecuTorch Python package runs the graph instead (graph_executorch_torch.py), and
the program says so.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from .files import sha256 as hash_file
from .files import temporary_beside
from .graph import Graph
from .manifest import GraphSpec, TensorSpec
from .packed_weights import locked, packed_path, prepare_packed, verify
from .progress import say

Array = np.ndarray
SOURCE = Path(__file__).with_name("executorch_shim.cpp")
LIBRARIES = ("executorch", "executorch_threadpool", "executorch_kernels_optimized", "executorch_backend_xnnpack")
COMPILERS = ("c++", "g++", "clang++")
MAX_RANK, TEXT_BYTES = 8, 512
TYPES = {6: "float32", 5: "float16", 1: "int8"}  # ExecuTorch's numbers
Form = tuple[str, tuple[int, ...]]  # of a tensor in a file: type, upper bounds of its sizes


def open_graph(
    path: Path, spec: GraphSpec, sha256: str, exported_with: str | None, cache_folder: Path, threads: int
) -> Graph:
    """sha256: what the manifest says of the file; exported_with: its version of executorch.

    ValueError: no executorch package or another version, a corrupt file, another number of threads than before.
    """
    check_version(path, exported_with)
    try:
        library = load_shim()
    except OSError as error:
        _say_once(f"{error}: ExecuTorch's Python package is used, which loads torch and packs weights in memory")
        verify(path, sha256)
        try:
            from .graph_executorch_torch import TorchGraph
        except ImportError as missing:
            raise ValueError(f"{missing}; install a C++ compiler, or the torch that ExecuTorch needs") from None
        return TorchGraph(path, spec, threads)
    return ExecutorchGraph(library, path, spec, sha256, cache_folder, threads)


class ExecutorchGraph:
    """One .pte file. A contiguous input of the declared type is not copied. Outputs alias the graph's buffers, which have
    the size of their upper bounds and are touched as far as used: an output is valid until the next call."""

    def __init__(
        self, library: ctypes.CDLL, path: Path, spec: GraphSpec, sha256: str, cache_folder: Path, threads: int
    ):
        self._library, self._path, self._spec = library, path, spec
        use_threads(library.g4_set_threads, threads)
        self._text, self._sizes = ctypes.create_string_buffer(TEXT_BYTES), (ctypes.c_int * MAX_RANK)()
        self._handle = self._open(sha256, cache_folder)
        self._inputs = InputCheck(path, spec.inputs, self._forms(0))
        outputs = self._forms(1)
        check_declared(path, spec.outputs, outputs)
        self._buffers = [np.empty(math.prod(bound), dtype) for dtype, bound in outputs]
        for i, buffer in enumerate(self._buffers):
            if library.g4_bind(self._handle, i, buffer.ctypes.data, self._text, TEXT_BYTES):
                raise self._refused("load")
        self._data = (ctypes.c_void_p * len(spec.inputs))()
        self._ranks = (ctypes.c_int * len(spec.inputs))(*(len(put.shape) for put in spec.inputs))
        self._all_sizes = (ctypes.c_int * sum(self._ranks))()

    def __call__(self, feeds: dict[str, Array]) -> dict[str, Array]:
        """ValueError names the input whose shape does not fit and the limit."""
        arrays = self._inputs(feeds)
        self._data[:] = [array.ctypes.data for array in arrays]
        self._all_sizes[:] = [size for array in arrays for size in array.shape]
        ranks, sizes = self._ranks, self._all_sizes
        if self._library.g4_run(self._handle, self._data, ranks, sizes, self._text, TEXT_BYTES):
            raise self._refused("run")
        return {put.name: self._output(i) for i, put in enumerate(self._spec.outputs)}

    def _output(self, i: int) -> Array:
        rank = self._library.g4_sizes(self._handle, i, self._sizes, MAX_RANK)
        shape = self._sizes[:rank]
        return self._buffers[i][: math.prod(shape)].reshape(shape)

    def _open(self, sha256: str, folder: Path) -> int:
        try:
            packed = packed_path(self._path, sha256, folder)
            with locked(folder):
                prepare_packed(self._library, self._path, sha256, packed)
                return self._open_with(packed)
        except OSError as error:
            _say_once(f"{folder}: {error.strerror or error}; weights are packed in memory, at each load")
        verify(self._path, sha256)
        return self._open_with(None)

    def _open_with(self, packed: Path | None) -> int:
        cache_file = os.fsencode(packed) if packed else None
        handle = self._library.g4_open(os.fsencode(self._path), cache_file, self._text, TEXT_BYTES)
        if not handle:
            raise self._refused("load")
        return handle

    def _forms(self, output: int) -> list[Form]:
        forms: list[Form] = []
        while (rank := self._library.g4_bound(self._handle, output, len(forms), self._sizes, MAX_RANK)) >= 0:
            forms.append((TYPES[self._library.g4_type(self._handle, output, len(forms))], tuple(self._sizes[:rank])))
        return forms

    def _refused(self, action: str) -> ValueError:
        reason = " ".join(self._text.value.decode(errors="replace").split())
        return ValueError(f"{self._path}: ExecuTorch cannot {action} it ({reason}); export the bundle again")

    def __del__(self):
        if getattr(self, "_handle", None):
            self._library.g4_close(self._handle)


class InputCheck:
    """Arrays in calling order, contiguous, of the declared type, whose shapes are what the spec declares and the file has
    room for."""

    def __init__(self, path: Path, inputs: tuple[TensorSpec, ...], forms: list[Form]):
        check_declared(path, inputs, forms)
        self._path, self._types = path, {put.name: put.dtype for put in inputs}
        self._dims = [
            (put.name, [(*_parse(size), limit) for size, limit in zip(put.shape, bound, strict=True)])
            for put, (_, bound) in zip(inputs, forms, strict=True)
        ]

    def __call__(self, feeds: dict[str, Array]) -> list[Array]:
        if feeds.keys() != self._types.keys():
            odd = sorted(feeds.keys() ^ self._types.keys())[0]
            raise ValueError(f"{self._path}: input {odd} is {'unknown' if odd in feeds else 'missing'}")
        arrays, known = [self._typed(name, feeds[name]) for name, _ in self._dims], {}
        for array, (name, dims) in zip(arrays, self._dims, strict=True):
            if array.ndim != len(dims):
                raise ValueError(f"{self._path}: input {name} has {array.ndim} dimensions, expected {len(dims)}")
            for size, (factor, symbol, limit) in zip(array.shape, dims, strict=True):
                want = factor * known.setdefault(symbol, -(-size // factor)) if symbol else factor
                if symbol and not 1 <= size <= limit:
                    raise ValueError(f"{self._path}: input {name} has a size of {size}, allowed are 1 to {limit}")
                if size != want:
                    raise ValueError(f"{self._path}: input {name} has a size of {size}, expected {want}")
        return arrays

    def _typed(self, name: str, array: Array) -> Array:
        dtype = self._types[name]
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise ValueError(f"{self._path}: input {name} is {array.dtype}, expected {dtype}")
        return np.ascontiguousarray(array, dtype)


def check_declared(path: Path, puts: tuple[TensorSpec, ...], forms: list[Form]) -> None:
    """ValueError if the tensors of a file are not those of the manifest: their number, types, ranks and fixed sizes."""
    declared = [(put.dtype, [size if isinstance(size, int) else None for size in put.shape]) for put in puts]
    if len(declared) == len(forms) and all(map(_fits, declared, forms)):
        return
    raise ValueError(f"{path}: inputs and outputs are not those of the manifest; export the bundle again")


def _fits(declared: tuple[str, list[int | None]], form: Form) -> bool:
    (dtype, sizes), (found, bound) = declared, form
    same_rank = dtype == found and len(sizes) == len(bound)
    return same_rank and all(want in (None, size) for want, size in zip(sizes, bound, strict=True))


def _parse(size: int | str) -> tuple[int, str]:
    """The size 4*T -> 4 and T; a fixed size is a factor without a symbol."""
    if isinstance(size, int):
        return size, ""
    factor, _, symbol = size.rpartition("*")
    return int(factor or 1), symbol


def check_version(path: Path, exported_with: str | None) -> None:
    package_folder()
    installed = importlib.metadata.version("executorch")
    if (exported_with or "").split("+")[0] != installed.split("+")[0]:
        raise ValueError(
            f"{path}: exported with executorch {exported_with or 'of unknown version'}, {installed} is installed; "
            "install that version or export the bundle again"
        )


def package_folder() -> Path:
    """Of the executorch package, found without importing it. ValueError names the extra to install."""
    spec = importlib.util.find_spec("executorch")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the executorch package is not installed; pip install -e '.[executorch]'")
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def load_shim() -> ctypes.CDLL:
    """OSError, with a reason to show, where the shim cannot be built or loaded."""
    built = build_shim(package_folder())
    try:
        library = ctypes.CDLL(str(built))
    except OSError:  # of another system: made once more
        built.unlink(missing_ok=True)
        library = ctypes.CDLL(str(build_shim(package_folder())))
    text = [ctypes.c_char_p, ctypes.c_size_t]
    library.g4_open.restype = ctypes.c_void_p
    library.g4_open.argtypes = [ctypes.c_char_p, ctypes.c_char_p, *text]
    library.g4_bound.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    library.g4_type.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    library.g4_bind.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, *text]
    library.g4_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, *text]
    library.g4_sizes.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    library.g4_close.argtypes, library.g4_close.restype = [ctypes.c_void_p], None
    return library


def build_shim(package: Path) -> Path:
    """The compiled shim in the user's cache folder, named after all it depends on; built where it is absent."""
    version = importlib.metadata.version("executorch")
    key = hashlib.sha256(f"{version} {platform.machine()} {package}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemma4-mtp"
    library = folder / f"executorch_shim-{key}.so"
    if not _whole(library):
        compiler = next(filter(shutil.which, (os.environ.get("CXX", ""), *COMPILERS)), None)
        if compiler is None:
            raise OSError(f"no C++ compiler ({', '.join(COMPILERS)})")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder):
                if not _whole(library):  # by another process, meanwhile
                    _compile(compiler, package, library)
        except PermissionError:
            raise OSError(f"{folder} cannot be written, set XDG_CACHE_HOME to a folder that can") from None
    return library


def _compile(compiler: str, package: Path, library: Path) -> None:
    say("compiling the ExecuTorch shim, once")
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:  # so that `library` is whole or absent
        made = Path(scratch) / library.name
        done = subprocess.run([compiler, *build_options(package, made)], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{compiler} cannot compile {SOURCE} ({' '.join(done.stderr.split())[:200]})")
        digest = hash_file(made)
        os.replace(made, library)
    with temporary_beside(_record(library)) as record:
        record.write_text(digest)
        os.replace(record, _record(library))


def _whole(library: Path) -> bool:
    """A library that is cut short may load and end the process."""
    try:
        return hash_file(library) == _record(library).read_text()
    except OSError:
        return False


def _record(library: Path) -> Path:
    return library.with_suffix(".sha256")


def build_options(package: Path, out: Path) -> list[str]:
    include, libraries = package / "include", package / "lib"
    return [
        *("-O2", "-std=c++17", "-Wall", "-Wextra", "-shared", "-fPIC", "-DC10_USING_CUSTOM_GENERATED_MACROS"),
        *("-isystem", str(include), "-isystem", str(include / "executorch/runtime/core/portable_type/c10")),
        *(str(SOURCE), "-o", str(out), f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-Wl,--no-as-needed"),
        *(f"-l{name}" for name in LIBRARIES),
    ]


_pool_threads: list[int] = []


def use_threads(set_threads: Callable[[int], object], threads: int) -> None:
    """Before the first graph; ValueError if this process has another number. Loaded graphs keep pointing at their pool."""
    if not _pool_threads:
        if set_threads(threads):
            raise ValueError(f"ExecuTorch cannot run {threads} threads")
        _pool_threads.append(threads)
    if _pool_threads != [threads]:
        raise ValueError(f"this process runs ExecuTorch with {_pool_threads[0]} threads and cannot change to {threads}")


@cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr)
