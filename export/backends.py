"""The graphs of a pair as one backend's files. A backend is a recipe, a lowering and a folder; the rest is shared."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torch import nn
from tqdm import tqdm

from runtime_py.manifest import TableSpec

from .embeddings import shared_table, write_table
from .graphs import CrossDecoder, Drafter, SelfDecoder
from .lower_onnx import Placement
from .quant import RECIPES, QuantSpec, TensorError
from .trace import trace
from .weights import Weights

SUFFIXES = {"onnx": ".onnx", "executorch": ".pte"}
EXECUTORCH_CONTEXT = 4096  # .pte files reserve work space for their bounds: 75 MB here, 332 MB for twice as much


@dataclass(frozen=True)
class Lowered:
    """What one backend's export made. modules: graph -> its module with declared inputs and outputs; placement: of the
    head in cross_decoder's file."""

    backend: str
    recipe_name: str
    max_context_tokens: int
    modules: dict[str, nn.Module]
    placement: Placement
    errors: list[TensorError]

    def file(self, graph: str) -> str:
        return f"{self.backend}/{graph}{SUFFIXES[self.backend]}"


def lowering(backend: str) -> ModuleType:
    """ValueError where the backend's package is not installed."""
    if backend == "onnx":
        from . import lower_onnx

        return lower_onnx
    try:
        from . import lower_executorch
    except ImportError as error:
        raise ValueError(f"{error}: ExecuTorch is an extra; pip install -e '.[executorch]'") from None
    return lower_executorch


def lower_pair(
    backend: str,
    recipe_name: str,
    kv_dtype: str,
    target: Weights,
    drafter: Weights,
    context: int | None,
    bundle: Path,
    bar: tqdm,
) -> Lowered:
    """Trace, lower and write the three graphs. kv_dtype: of past rows; context: the most of them of an ExecuTorch graph.
    bar: of the whole export."""
    module, recipe, limit = lowering(backend), RECIPES[backend][recipe_name], target.config.max_context_tokens
    if backend == "executorch":
        limit = min(limit, context or EXECUTORCH_CONTEXT)
    modules, errors, placement = {}, [], {}
    for graph, weights in ((SelfDecoder, target), (CrossDecoder, target), (Drafter, drafter)):
        say = _stages(bar, f"{backend} {graph.name}")
        say("trace")
        modules[graph.name], program = trace(graph, weights.config, recipe, limit, kv_dtype)
        found = module.write(modules[graph.name], program, weights, bundle / backend, errors, say)
        if graph is CrossDecoder:
            placement = found
    return Lowered(backend, recipe_name, limit, modules, placement, errors)


def _stages(bar: tqdm, graph: str) -> Callable[[str], None]:
    return lambda stage: bar.set_postfix_str(f"{graph}: {stage}")


def token_table(lowered: Lowered, target: Weights) -> TableSpec | None:
    """The head's rows in the backend's own file; None where there is no such copy."""
    config = target.config
    spec = RECIPES[lowered.backend][lowered.recipe_name].spec(f"{CrossDecoder.name}.lm_head", config.hidden_size)
    needed = {"lm_head.weight", "lm_head.scale"} if spec else {"lm_head.weight"}
    if not config.tied_head or not needed <= lowered.placement.keys():
        return None
    file = lowered.file(CrossDecoder.name) + (".data" if lowered.backend == "onnx" else "")
    return shared_table(lowered.placement, file, spec, config.hidden_size, config.embedding_scale)


def own_token_table(spec: QuantSpec | None, target: Weights, bundle: Path, errors: list[TensorError]) -> TableSpec:
    """embeddings/token.bin, for the backends whose head is no token table."""
    return write_table(target, "embed_tokens.weight", "token", bundle, spec, errors, target.config.embedding_scale)
