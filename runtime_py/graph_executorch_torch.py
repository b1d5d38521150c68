"""Graphs on the ExecuTorch Python package, where the shim of graph_executorch.py cannot be built. Imports torch."""

import contextlib
import io
import warnings
from pathlib import Path

import numpy as np
import torch  # before the bindings, which are linked with it
from executorch.extension.pybindings import _C as bindings  # portable_lib would import all of the exporter first

from .graph_executorch import TYPES, Form, InputCheck, check_declared, use_threads
from .manifest import GraphSpec

Array = np.ndarray
warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing here writes to an input


class TorchGraph:
    """One .pte file, verified by the caller. A contiguous input of the declared type is not copied; outputs are copies."""

    def __init__(self, path: Path, spec: GraphSpec, threads: int):
        self._path, self._outputs = path, [put.name for put in spec.outputs]
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # ExecuTorch logs what it does
                use_threads(bindings._unsafe_reset_threadpool, threads)
                self._module = bindings._load_for_executorch(str(path))
                meta = self._module.method_meta("forward")
        except RuntimeError as error:
            raise ValueError(f"{path}: ExecuTorch cannot load it ({error}); export the bundle again") from None
        inputs = [_form(meta.input_tensor_meta(i)) for i in range(meta.num_inputs())]
        outputs = [_form(meta.output_tensor_meta(i)) for i in range(meta.num_outputs())]
        check_declared(path, spec.outputs, outputs)
        self._inputs = InputCheck(path, spec.inputs, inputs)

    def __call__(self, feeds: dict[str, Array]) -> dict[str, Array]:
        tensors = [torch.from_numpy(array) for array in self._inputs(feeds)]
        try:
            outputs = self._module.forward(tensors)
        except RuntimeError as error:
            raise ValueError(f"{self._path}: ExecuTorch cannot run it ({error}); export the bundle again") from None
        return {name: tensor.numpy() for name, tensor in zip(self._outputs, outputs, strict=True)}


def _form(tensor: bindings.TensorInfo) -> Form:
    return TYPES.get(tensor.dtype(), "another type"), tuple(tensor.sizes())
