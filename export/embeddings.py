"""Row-quantized tables that the host maps: token and per-layer embeddings, and the drafter's centroid head."""

import math
from pathlib import Path

import torch
from torch import Tensor

from runtime_py.manifest import ArraySpec, CentroidHeadSpec, TableSpec

from .lower_onnx import Placement, pack
from .quant import QuantSpec, TensorError
from .weights import TensorRef, Weights, token_ordering

FOLDER = "embeddings"


def shared_table(placement: Placement, file: str, spec: QuantSpec | None, columns: int, multiplier: float) -> TableSpec:
    """The rows of the head inside the file of a graph, read as the token table."""
    offset, dtype, shape = placement["lm_head.weight"]
    data = ArraySpec(file, offset, dtype, (shape[0], math.prod(shape[1:])))
    if spec is None:
        return TableSpec(data, None, 32, 0, columns, columns, multiplier)
    offset, scale_dtype, shape = placement["lm_head.scale"]
    scales = ArraySpec(file, offset, scale_dtype, (shape[0], math.prod(shape[1:])))
    zero_point = 1 << (spec.bits - 1) if dtype == "uint8" else 0
    return TableSpec(data, scales, spec.bits, zero_point, spec.width(columns), columns, multiplier)


def write_table(
    weights: Weights,
    tensor: str,
    name: str,
    bundle: Path,
    spec: QuantSpec | None,
    errors: list[TensorError],
    multiplier: float = 1.0,
    order: Tensor | None = None,
) -> TableSpec:
    """embeddings/<name>.bin (int8, float32, or uint8 with two 4-bit values a byte, low nibble first) and
    embeddings/<name>.scales.bin (bfloat16), row by row.

    order: row j of the table is row order[j] of the tensor.
    """
    rows, columns = weights.checkpoint.shape(tensor)
    packed = spec is not None and spec.bits == 4
    data_file, scales_file = f"{FOLDER}/{name}.bin", f"{FOLDER}/{name}.scales.bin"
    # whole from the start: pieces kept among the chunks would keep malloc from reusing the chunks' places
    scales = torch.empty(rows, spec.groups(columns) if spec else 0, dtype=torch.bfloat16)
    with open(bundle / data_file, "wb") as file:
        for chunk in weights.stream(TensorRef(tensor, 0, rows), spec, f"{FOLDER}.{name}", errors, order):
            values = pack(chunk.values, 4, 2) if packed else chunk.values  # rows of whole bytes, without more padding
            file.write(values.numpy().data)
            if chunk.scale is not None:
                scales[chunk.start : chunk.start + len(chunk.scale)] = chunk.scale
    if spec is None:
        data = ArraySpec(data_file, 0, "float32", (rows, columns))
        return TableSpec(data, None, 32, 0, columns, columns, multiplier)
    (bundle / scales_file).write_bytes(scales.view(torch.uint16).numpy().tobytes())
    stored = ("uint8", (rows, -(-columns // 2))) if packed else ("int8", (rows, columns))
    data, array = ArraySpec(data_file, 0, *stored), ArraySpec(scales_file, 0, "bfloat16", tuple(scales.shape))
    return TableSpec(data, array, spec.bits, 8 if packed else 0, spec.width(columns), columns, multiplier)


def write_centroid_head(
    drafter: Weights, bundle: Path, spec: QuantSpec | None, errors: list[TensorError]
) -> CentroidHeadSpec:
    """The drafter's tied head in cluster order, its centroids (float32) and the token ids (int32) of every cluster."""
    order = token_ordering(drafter)
    clusters, hidden = drafter.config.num_centroids, drafter.config.hidden_size
    table = write_table(drafter, "embed_tokens.weight", "drafter_head", bundle, spec, errors, order=order)
    name = "masked_embedding.centroids.weight"
    chunks = drafter.stream(TensorRef(name, 0, clusters), None, f"{FOLDER}.drafter_centroids", errors)
    centroids, ids = torch.cat([chunk.values for chunk in chunks]).numpy(), order.to(torch.int32).numpy()
    files = {"centroids": f"{FOLDER}/drafter_centroids.bin", "ids": f"{FOLDER}/drafter_token_ordering.bin"}
    (bundle / files["centroids"]).write_bytes(centroids.tobytes())
    (bundle / files["ids"]).write_bytes(ids.tobytes())
    return CentroidHeadSpec(
        table=table,
        centroids=ArraySpec(files["centroids"], 0, "float32", (clusters, hidden)),
        token_ordering=ArraySpec(files["ids"], 0, "int32", (clusters, len(ids) // clusters)),
        top_k=drafter.config.centroid_top_k,
    )
