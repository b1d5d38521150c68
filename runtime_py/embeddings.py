"""Memory-mapped tables of a bundle: only the rows that are asked for are read."""

from pathlib import Path

import numpy as np

from .manifest import ArraySpec, TableSpec

Array = np.ndarray


def map_array(bundle: Path, spec: ArraySpec) -> Array:
    """Read-only view of an array in a file; bfloat16 as uint16."""
    dtype = "uint16" if spec.dtype == "bfloat16" else spec.dtype
    return np.memmap(bundle / spec.file, dtype=dtype, mode="r", offset=spec.offset_bytes, shape=spec.shape)


def to_float(values: Array) -> Array:
    """float32 of values as `map_array` gives them: uint16 is bfloat16, the upper half of a float32."""
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values.astype(np.float32)


def to_values(data: Array, bits: int) -> Array:
    """Rows of a table's data, [..., stored] as they lie -> float32 [..., values], before zero point and scales."""
    if bits == 4:  # low nibble first
        data = np.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], -1)
    return data.astype(np.float32)


class EmbeddingTable:
    """Token ids -> float32 rows of a row-quantized table."""

    def __init__(self, bundle: Path, spec: TableSpec):
        self.spec = spec
        self._data = map_array(bundle, spec.data)
        self._scales = map_array(bundle, spec.scales) if spec.scales else None

    def rows(self, ids: list[int]) -> Array:
        """[len(ids), columns]"""
        columns = self.spec.columns
        values = to_values(self._data[ids], self.spec.bits)[:, :columns]
        if self._scales is not None:
            values -= self.spec.zero_point
            block = min(self.spec.block, columns)  # one longer than a row has one scale
            values *= np.repeat(to_float(self._scales[ids]), block, 1)[:, :columns]  # the last may be shorter
        return np.ascontiguousarray(values) * np.float32(self.spec.multiplier)
