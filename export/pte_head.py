"""Where the rows of a head lie in a .pte file, so that the host can map them as the token table.

ExecuTorch keeps a constant's bytes in the file as XNNPACK's serializer gives them: int8 rows with float32 scales as they
are, 4-bit rows as MatMulNBits has them with bfloat16 scales (convert_to_qc4w and get_quant_params of its NodeVisitor).
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from .lower_onnx import Placement, pack
from .quant import QuantSpec

READ_BYTES = 1 << 24


def find_head(path: Path, spec: QuantSpec | None, state: Mapping[str, Tensor]) -> Placement:
    """state: the program's values by name -> placement of lm_head.weight [O, stored] and lm_head.scale, as far as they
    lie in the file."""
    placement = {}
    with open(path, "rb") as file:
        for name in ("lm_head.weight", "lm_head.scale"):
            if (values := state.get(name)) is None:
                continue
            offset, row = _find(file.fileno(), functools.partial(_pieces, values, spec)), _stored(values[:1], spec)
            if offset is not None:
                placement[name] = offset, str(row.dtype).removeprefix("torch."), (len(values), *row.shape[1:])
    return placement


def _stored(values: Tensor, spec: QuantSpec | None) -> Tensor:
    """Rows or scales as the serializer writes them."""
    if spec is None or spec.bits == 8:
        return values
    return pack(values, 4, 2).flatten(1) if values.dtype == torch.int8 else values.bfloat16()


def _pieces(values: Tensor, spec: QuantSpec | None) -> Iterator[bytes]:
    for part in values.split(max(1, READ_BYTES // values[:1].nbytes)):
        yield _stored(part, spec).view(torch.uint8).numpy().tobytes()


def _find(file: int, pieces: Callable[[], Iterator[bytes]]) -> int | None:
    """Offset of bytes in a file, read in pieces: a mapped file of this size would count as memory."""
    start, size = next(pieces())[:4096], os.fstat(file).st_size
    for base in range(0, size, READ_BYTES):
        piece = os.pread(file, READ_BYTES + len(start) - 1, base)
        at = piece.find(start)
        while at >= 0:
            if _lies_at(file, base + at, pieces()):
                return base + at
            at = piece.find(start, at + 1)
    return None


def _lies_at(file: int, offset: int, pieces: Iterator[bytes]) -> bool:
    for piece in pieces:
        if os.pread(file, len(piece), offset) != piece:
            return False
        offset += len(piece)
    return True
