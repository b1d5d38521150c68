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
    """bits: 8 or 4, symmetric. group: columns that share a scale (None: the whole row); a row's last may be shorter.
    negative_scales: allowed, so that -8 can stand for a group's largest value of either sign (XNNPACK refuses them).
    scale_dtype: of the scales in a file; all of them are numbers that bfloat16 can hold."""

    bits: int
    group: int | None
    negative_scales: bool = False
    scale_dtype: torch.dtype = torch.bfloat16

    def width(self, columns: int) -> int:
        return self.group or columns

    def groups(self, columns: int) -> int:
        return -(-columns // self.width(columns))


@dataclass(frozen=True)
class Recipe:
    """rules: (pattern over "graph.module", spec); the first match wins, without one a tensor stays float32. row_invariant: every row of a graph's outputs has the same bits whatever rows are run with it.
    whole_groups: a spec whose group does not divide the columns is passed over, but for the last that matches."""

    rules: tuple[tuple[str, QuantSpec], ...]
    row_invariant: bool
    whole_groups: bool = False

    def spec(self, name: str, columns: int) -> QuantSpec | None:
        found = [spec for pattern, spec in self.rules if fnmatchcase(name, pattern)]
        return next((spec for spec in found if self._takes(spec, columns)), found[-1] if found else None)

    def _takes(self, spec: QuantSpec, columns: int) -> bool:
        return not self.whole_groups or columns % spec.width(columns) == 0


# float32, which MatMulNBits takes as they lie in the mapped file: of bfloat16 it would keep a float32 copy in memory
INT8 = QuantSpec(8, 64, scale_dtype=torch.float32)
INT4, INT4_WIDE = (QuantSpec(4, group, negative_scales=True, scale_dtype=torch.float32) for group in (32, 128))
INT8_ROWS = QuantSpec(8, None, scale_dtype=torch.float32)  # XNNPACK has no 8-bit groups
INT4_POSITIVE, INT4_WIDE_POSITIVE = QuantSpec(4, 32), QuantSpec(4, 128)
FLOAT32 = Recipe((), row_invariant=False)
# small keeps the drafter's linears at 8 bit: 5 MB of E2B, and on the tiny pair, its target in blocks of 32, 0.65 of 3
# drafts are accepted at 4 bit, 0.66 at 8. Its head, 30 MB, is 4 bit: no difference there. (int8: 0.82; the target's
# 4 bits cost the rest.)
RECIPES = {  # backend -> name -> forms of the graphs' weights
    "onnx": {
        "fp32": FLOAT32,  # onnxruntime multiplies a single float32 row in another order
        "int8": Recipe((("*", INT8),), row_invariant=True),
        # Whole groups: on ARM64 a row whose last 4-bit block is shorter has other bits alone than among others
        "int4": Recipe((("*_decoder.layers.*", INT4), ("*", INT8)), row_invariant=True, whole_groups=True),
        "small": Recipe(
            (("*_decoder.*", INT4_WIDE), ("*_decoder.*", INT4), ("*", INT8)), row_invariant=True, whole_groups=True
        ),
    },
    "executorch": {
        "fp32": Recipe((), row_invariant=True),
        "int8": Recipe((("*", INT8_ROWS),), row_invariant=True),
        "int4": Recipe(
            (("drafter.*", INT8_ROWS), ("*.lm_head", INT8_ROWS), ("*", INT4_POSITIVE), ("*", INT8_ROWS)),
            row_invariant=True,
            whole_groups=True,
        ),
        "small": Recipe(
            (("drafter.*", INT8_ROWS), ("*", INT4_WIDE_POSITIVE), ("*", INT4_POSITIVE), ("*", INT8_ROWS)),
            row_invariant=True,
            whole_groups=True,
        ),
    },
}
Tables = dict[str, QuantSpec | None]  # name of a table of the host -> its form
PER_LAYER_INT8 = QuantSpec(8, 256)  # at Gemma's sizes one scale per (token, layer)
PER_LAYER_BLOCK = 128  # most values that share a scale at 4 bits


def tables(recipe_name: str, per_layer_size: int, ple_bits: int | None = None) -> Tables:
    """Forms of the tables that the host maps, the same for all backends.

    per_layer_size: values per (token, layer); ple_bits: 8 or 4, of the per-layer table (None: 8).
    """
    check_ple_bits(recipe_name, ple_bits)
    if recipe_name == "fp32":
        return {"token": None, "per_layer": None, "drafter_head": None}
    small = recipe_name == "small"
    return {
        "token": QuantSpec(4, 128, negative_scales=True) if small else QuantSpec(8, 64),
        "per_layer": _per_layer_int4(per_layer_size) if ple_bits == 4 else PER_LAYER_INT8,
        "drafter_head": QuantSpec(4, 32, negative_scales=True) if small else QuantSpec(8, None),
    }


def check_ple_bits(recipe_name: str, ple_bits: int | None) -> None:
    """ValueError where bits are given that the per-layer table cannot have."""
    if ple_bits is not None and recipe_name == "fp32":
        raise ValueError(f"--ple-bits {ple_bits}: fp32 quantizes no table; leave it out or choose another recipe")
    if ple_bits not in (None, 4, 8):
        raise ValueError(f"--ple-bits {ple_bits} is neither 4 nor 8")


def _per_layer_int4(size: int) -> QuantSpec:
    """Blocks that end where a layer's values end."""
    block = max(block for block in range(1, PER_LAYER_BLOCK + 1) if size % block == 0)
    return QuantSpec(4, block, negative_scales=True)


def quantize(weight: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """float [O, I] -> int8 [O, I] in [-127, 127] or [-8, 7], float32 scales [O, ceil(I / group)].

    At 4 bits a group takes the better of two scales: its largest value becomes 7 or -7, or it becomes -8 (llama.cpp's
    Q4_0, so that weights trained on that lattice keep their values). Without negative scales, -8 if it is negative.
    """
    blocks = _blocks(weight.float(), spec.width(weight.shape[1]))
    high, low = blocks.amax(-1), blocks.amin(-1)
    largest = torch.maximum(high, -low)
    if spec.bits == 8:
        scale = _scale(largest / 127)
        q = _round(blocks, scale, -127, 127)
    else:
        signed = torch.where(high > -low, -largest, largest) if spec.negative_scales else largest
        scale, q = _better(blocks, _scale(largest / 7), _scale(signed / 8))
    return q.to(torch.int8).flatten(1)[:, : weight.shape[1]].contiguous(), scale


def _better(blocks: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """-> per group the scale with the smaller squared error, and the values rounded with it"""
    ours, theirs = (_round(blocks, scale, -8, 7) for scale in (first, second))
    errors = [
        (q * scale[..., None] - blocks).square_().sum(-1, keepdim=True)
        for q, scale in ((ours, first), (theirs, second))
    ]
    take = errors[0] <= errors[1]
    return torch.where(take[..., 0], first, second), torch.where(take, ours, theirs)


def _scale(value: Tensor) -> Tensor:
    """The nearest that bfloat16 holds, never 0"""
    return torch.where(value.abs() < 1e-12, 1e-12, value).bfloat16().float()


def _round(blocks: Tensor, scale: Tensor, lowest: int, highest: int) -> Tensor:
    return (blocks / scale[..., None]).round_().clamp_(lowest, highest)


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
