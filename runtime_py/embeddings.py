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


class EmbeddingTable:
    """Token ids -> float32 rows of a row-quantized table."""

    def __init__(self, bundle: Path, spec: TableSpec):
        self.spec = spec
        self._data = map_array(bundle, spec.data)
        self._scales = map_array(bundle, spec.scales) if spec.scales else None

    def rows(self, ids: list[int]) -> Array:
        """[len(ids), columns]"""
        values = self._data[ids].astype(np.float32)
        if self._scales is not None:
            values -= self.spec.zero_point
            scales = to_float(self._scales[ids])
            for group in range(scales.shape[1]):  # the last one may be shorter
                values[:, group * self.spec.block : (group + 1) * self.spec.block] *= scales[:, group : group + 1]
        return np.ascontiguousarray(values[:, : self.spec.columns]) * np.float32(self.spec.multiplier)
