"""Weight quantization: recipes as data, one function, and the error it makes.

The one canonical form is int8 [O, I] with scales [O, ceil(I / group)] that bfloat16 can hold; each backend re-lays it.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class QuantSpec:
    """bits: 8 or 4, symmetric. group: columns that share a scale (None: the whole row); a row's last may be shorter."""

    bits: int
    group: int | None

    def width(self, columns: int) -> int:
        return self.group or columns

    def groups(self, columns: int) -> int:
        return -(-columns // self.width(columns))


@dataclass(frozen=True)
class Recipe:
    """rules: (pattern over "graph.module" or "embeddings.table", spec); the first match wins, without one a tensor
    stays float32. row_invariant: every row of a graph's outputs has the same bits whatever rows are run with it.
    whole_groups: a spec whose group does not divide the columns is passed over."""

    rules: tuple[tuple[str, QuantSpec], ...]
    row_invariant: bool
    whole_groups: bool = False

    def spec(self, name: str, columns: int) -> QuantSpec | None:
        fits = (spec for pattern, spec in self.rules if fnmatchcase(name, pattern) and self._takes(spec, columns))
        return next(fits, None)

    def _takes(self, spec: QuantSpec, columns: int) -> bool:
        return not self.whole_groups or columns % spec.width(columns) == 0


INT8, INT4 = QuantSpec(8, 64), QuantSpec(4, 32)
INT8_ROWS = QuantSpec(8, None)  # XNNPACK has no 8-bit groups
TABLES = (
    ("embeddings.per_layer", QuantSpec(8, 256)),  # at Gemma's sizes one scale per (token, layer)
    ("embeddings.drafter_head", QuantSpec(8, None)),  # the host scales logits, not weights
    ("embeddings.token", INT8),
)
FLOAT32 = Recipe((), row_invariant=False)
RECIPES = {  # backend -> name
    "onnx": {
        "fp32": FLOAT32,  # onnxruntime multiplies a single float32 row in another order
        "int8": Recipe((*TABLES, ("*", INT8)), row_invariant=True),
        "int4": Recipe((*TABLES, ("drafter.*", INT8), ("*.lm_head", INT8), ("*", INT4)), row_invariant=True),
    },
    "executorch": {
        "fp32": Recipe((), row_invariant=True),
        "int8": Recipe((*TABLES, ("*", INT8_ROWS)), row_invariant=True),
        "int4": Recipe(
            (*TABLES, ("drafter.*", INT8_ROWS), ("*.lm_head", INT8_ROWS), ("*", INT4), ("*", INT8_ROWS)),
            row_invariant=True,
            whole_groups=True,
        ),
    },
}


def quantize(weight: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """float [O, I] -> int8 [O, I] in [-127, 127] or [-8, 7], float32 scales [O, ceil(I / group)]."""
    top = 127 if spec.bits == 8 else 7
    blocks = _blocks(weight.float(), spec.width(weight.shape[1]))
    scale = (blocks.abs().amax(-1) / top).clamp(min=1e-12).bfloat16().float()
    lowest = -127 if spec.bits == 8 else -8
    q = (blocks / scale[..., None]).round_().clamp_(lowest, top).to(torch.int8)
    return q.flatten(1)[:, : weight.shape[1]].contiguous(), scale


def dequantize(q: Tensor, scale: Tensor, group: int) -> Tensor:
    """int8 [O, I], float32 [O, ceil(I / group)] -> float32 [O, I]."""
    return (_blocks(q.float(), group) * scale[..., None]).flatten(1)[:, : q.shape[1]]


def _blocks(weight: Tensor, group: int) -> Tensor:
    """[O, I] -> [O, ceil(I / group), group], zeros on the right"""
    rows, columns = weight.shape
    return F.pad(weight, (0, -columns % group)).view(rows, -1, group)


@dataclass(frozen=True)
class TensorError:
    """What one tensor became. bits 32: not quantized. relative: ||w - dequantized|| / ||w||."""

    name: str
    bits: int
    size_bytes: int  # in the checkpoint
    relative: float
