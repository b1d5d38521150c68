"""A graph's state, filled from a checkpoint: which rows of which tensor each buffer is, read and quantized in chunks.

The writers of files and the eager graphs take their weights from the same stream, so that they hold the same numbers.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .checkpoint import Checkpoint, account, open_checkpoint
from .config import DrafterConfig, TargetConfig, drafter_config, target_config
from .graphs import CrossDecoder, Drafter, SelfDecoder
from .graphs.layers import Linear
from .quant import FLOAT32, QuantSpec, TensorError, dequantize, quantize

CHUNK_ELEMENTS = 1 << 18  # 1 MiB as float32: stays in the processor's cache, and malloc reuses pieces of this size
READ_CHUNKS = 8
MODEL_PROJECTION = re.compile(r"layers\.(\d+)\.per_layer_model_projection\.weight")
PROJECTION_NORM = re.compile(r"layers\.\d+\.per_layer_projection_norm\.weight")


class TensorRef(NamedTuple):
    """Rows start..stop of a checkpoint tensor."""

    name: str
    start: int
    stop: int


class Chunk(NamedTuple):
    """Rows of one buffer from `start` on: values float32 with scale None, or int8 [rows, I] with scale [rows, groups]."""

    start: int
    values: Tensor
    scale: Tensor | None


@dataclass(frozen=True)
class Weights:
    """A checkpoint with its frozen configuration. wrote: is told the bytes of every chunk, when it is written."""

    checkpoint: Checkpoint
    config: TargetConfig | DrafterConfig
    wrote: Callable[[int], object] = lambda size_bytes: None

    def state(self, graph: nn.Module) -> Iterator[tuple[str, TensorRef, QuantSpec | None]]:
        return states(graph, self.config)

    def stream(
        self, ref: TensorRef, spec: QuantSpec | None, label: str, errors: list[TensorError], order: Tensor | None = None
    ) -> Iterator[Chunk]:
        """Rows of a tensor in chunks of a MiB, quantized as spec says; what that did is added to errors as `label`.

        order: row indices, for a table that lies in another order than the checkpoint's.
        """
        shape, place = self.checkpoint.shape(ref.name), self.checkpoint.tensors[ref.name]
        columns = math.prod(shape[1:])
        error = weight = 0.0  # sums of squares
        for start, stored in self._pieces(ref, max(1, CHUNK_ELEMENTS // columns), order):
            stop, rows = start + len(stored), stored.float()
            if not rows.isfinite().all():
                raise ValueError(f"{place.file}: tensor {place.key} holds a value that is not finite")
            chunk = Chunk(start - ref.start, *(quantize(rows, spec) if spec else (rows, None)))
            if spec:
                error += _square_sum(dequantize(*chunk[1:], spec.width(columns)) - rows)
                weight += _square_sum(rows)
            yield chunk
            self.wrote(written_bytes(stop - start, columns, spec))
        size_bytes = (ref.stop - ref.start) * columns * (4 if place.dtype == "F32" else 2)
        relative = math.sqrt(error / weight) if weight else 0.0
        errors.append(TensorError(label, spec.bits if spec else 32, size_bytes, relative))

    def _pieces(self, ref: TensorRef, step: int, order: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """(first row, `step` rows) as stored; many are read at a time, for a file's header is read every time."""
        ordered = None if order is None else self.checkpoint.read(ref.name)[order]
        for first in range(ref.start, ref.stop, step * READ_CHUNKS):
            last = min(first + step * READ_CHUNKS, ref.stop)
            rows = self.checkpoint.read(ref.name, first, last) if ordered is None else ordered[first:last]
            for start in range(0, last - first, step):
                yield first + start, rows[start : start + step]


def states(graph: nn.Module, config: TargetConfig | DrafterConfig) -> Iterator[tuple[str, TensorRef, QuantSpec | None]]:
    """(buffer, where its rows come from, its form) of every weight of a graph; scales come with their weight."""
    linears = {f"{name}.weight": module for name, module in graph.named_modules() if isinstance(module, Linear)}
    for buffer, value in graph.named_buffers():
        if not buffer.endswith(".scale"):
            yield buffer, _ref(buffer, value.shape[0], config), linears[buffer].spec if buffer in linears else None


def _ref(buffer: str, rows: int, config: TargetConfig | DrafterConfig) -> TensorRef:
    """Buffers have the checkpoint's names, but for a tied head and what the layers of a target share."""
    if match := MODEL_PROJECTION.fullmatch(buffer):
        return TensorRef("per_layer_model_projection.weight", int(match[1]) * rows, (int(match[1]) + 1) * rows)
    if PROJECTION_NORM.fullmatch(buffer):
        return TensorRef("per_layer_projection_norm.weight", 0, rows)
    tied = isinstance(config, DrafterConfig) or config.tied_head
    return TensorRef("embed_tokens.weight" if buffer == "lm_head.weight" and tied else buffer, 0, rows)


def fill(graph: nn.Module, weights: Weights) -> nn.Module:
    """Real values into a graph's buffers: the eager reference of a file."""
    buffers = dict(graph.named_buffers())
    for buffer, ref, spec in weights.state(graph):
        for chunk in weights.stream(ref, spec, buffer, []):
            rows = slice(chunk.start, chunk.start + len(chunk.values))
            buffers[buffer][rows] = chunk.values
            if chunk.scale is not None:
                buffers[buffer.removesuffix("weight") + "scale"][rows] = chunk.scale
    return graph.eval()


def open_target(source: str) -> Weights:
    """Folder or hub id of the target. ValueError names what is wrong with it."""
    checkpoint = open_checkpoint(source)
    config = target_config(checkpoint.config, checkpoint.dtype)
    return Weights(account(checkpoint, target_shapes(config), len(config.own_layers), config.tied_head), config)


def open_drafter(source: str) -> Weights:
    """Folder or hub id of the drafter. ValueError names what is wrong with it."""
    checkpoint = open_checkpoint(source)
    config = drafter_config(checkpoint.config)
    weights = Weights(account(checkpoint, drafter_shapes(config), 0, tied_head=True), config)
    if config.num_centroids:
        token_ordering(weights)
    return weights


def target_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """canonical checkpoint name -> shape, of every tensor of a target"""
    per_layer = len(config.layers) * config.per_layer_input_size
    return _shapes(config, (SelfDecoder, CrossDecoder)) | {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "embed_tokens_per_layer.weight": (config.vocab_size, per_layer),
        "per_layer_model_projection.weight": (per_layer, config.hidden_size),
    }


def drafter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """canonical checkpoint name -> shape, of every tensor of a drafter"""
    tables = {"embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    if config.num_centroids:
        tables["masked_embedding.centroids.weight"] = (config.num_centroids, config.hidden_size)
        tables["masked_embedding.token_ordering"] = (config.vocab_size,)
    return _shapes(config, (Drafter,)) | tables


def token_ordering(drafter: Weights) -> Tensor:
    """masked_embedding.token_ordering int64 [V]: row c of its [C, V / C] view holds the token ids of centroid c."""
    order = drafter.checkpoint.read("masked_embedding.token_ordering").long()
    if not torch.equal(order.sort().values, torch.arange(len(order))):
        file = drafter.checkpoint.tensors["masked_embedding.token_ordering"].file
        raise ValueError(f"{file}: masked_embedding.token_ordering is no permutation of 0..{len(order) - 1}")
    return order


def _shapes(config: TargetConfig | DrafterConfig, graphs: tuple[type[nn.Module], ...]) -> dict[str, tuple[int, ...]]:
    """canonical checkpoint name -> shape, of everything that the graphs hold"""
    shapes = {}
    for graph in graphs:
        with torch.device("meta"):
            module = graph(config, FLOAT32)
        shapes |= {ref.name: tuple(module.get_buffer(name).shape) for name, ref, _ in states(module, config)}
    return shapes


def written_bytes(rows: int, columns: int, spec: QuantSpec | None) -> int:
    """Bytes that rows of a tensor take in a file: whole groups and their scales."""
    if spec is None:
        return rows * columns * 4
    groups = spec.groups(columns)
    return rows * (groups * spec.width(columns) * spec.bits // 8 + groups * spec.scale_dtype.itemsize)


def _square_sum(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))
