"""Graph -> the one torch.export program that every backend lowers. Weights are fake: only names, shapes and dtypes."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram

from runtime_py.manifest import CHUNK_ROWS, TensorSpec

from .config import TextConfig
from .quant import Recipe

EXAMPLE_SIZES = {"T": 3, "R": 2, "P_sliding": 5, "P_full": 7}  # all different, none 0 or 1: torch.export would pin them


def trace(
    graph: type[nn.Module], config: TextConfig, recipe: Recipe, max_context_tokens: int, kv_dtype: str = "float32"
) -> tuple[nn.Module, ExportedProgram]:
    """The graph with fake weights and its program; input sizes are dynamic as the graph's specs say."""
    # one sliding row more than ours: Transformers' assistant sees that many, which is needed to compare drafts
    limits = {"T": CHUNK_ROWS, "R": CHUNK_ROWS, "P_sliding": config.window + 1, "P_full": max_context_tokens}
    dims = {symbol: Dim(symbol, min=1, max=limit) for symbol, limit in limits.items()}
    with FakeTensorMode(), torch.no_grad():
        module = graph(config, recipe, kv_dtype).eval()
        example = tuple(
            torch.empty(_sizes(spec, EXAMPLE_SIZES), dtype=getattr(torch, spec.dtype)) for spec in module.inputs
        )
        dynamic = tuple(
            {i: size for i, size in enumerate(_sizes(spec, dims)) if not isinstance(size, int)}
            for spec in module.inputs
        )
        return module, torch.export.export(module, example, dynamic_shapes=(dynamic,), strict=False)


def _sizes(spec: TensorSpec, symbols: dict) -> list:
    """Shape with every symbol replaced: "4*T" -> 4 * symbols["T"]."""
    sizes = []
    for size in spec.shape:
        factor, _, symbol = str(size).rpartition("*")
        sizes.append(size if isinstance(size, int) else int(factor) * symbols[symbol] if factor else symbols[symbol])
    return sizes
