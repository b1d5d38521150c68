"""Exported program -> .onnx and .onnx.data for onnxruntime: the ONNX spelling of every gemma4 operation.

Weights are fake while the graph is built. They get their place in the external data file afterwards and are written
there one at a time, so that neither a tensor nor the file is ever held whole.
"""

import functools
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
import onnxscript
import onnxscript.optimizer
import torch
import torch.nn.functional as F
from onnx.defs import OpSchema
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.onnx._internal._lazy_import import onnxscript_apis

from .quant import QuantSpec, TensorError
from .weights import Chunk, Weights

OPSET = 23  # RMSNormalization, RotaryEmbedding
std = onnxscript.opset23
Placement = dict[str, tuple[int, str, tuple[int, ...]]]
_torchlib_ops = functools.cache(onnxscript_apis.get_torchlib_ops)
WIDEST_ALIKE = {8: 64, 4: 32}  # bits -> widest block in which a row alone has the bits that it has among others
PAGE_BYTES, LINE_BYTES = 4096, 64  # a tensor of a page or more starts on a page, so that it can be mapped by itself


def _contrib(name: str, inputs: tuple[str, ...], attributes: dict[str, str]) -> onnxscript.values.Op:
    """An operator of onnxruntime's own domain: onnx has no schema for it, the exporter wants one."""
    domain = onnxscript.values.Opset("com.microsoft", 1)
    types = [f"tensor({kind})" for kind in ("float", "uint8")]
    schema = OpSchema(
        name,
        domain.domain,
        domain.version,
        inputs=[OpSchema.FormalParameter(f"input{i}", kind) for i, kind in enumerate(inputs)],
        outputs=[OpSchema.FormalParameter("output", inputs[0])],
        type_constraints=[(kind, types, "") for kind in dict.fromkeys(inputs)],
        attributes=[
            OpSchema.Attribute(key, getattr(OpSchema.AttrType, kind), required=False)
            for key, kind in attributes.items()
        ],
    )
    return onnxscript.values.Op(domain, name, schema)


_INTS = dict.fromkeys(("K", "N", "bits", "block_size", "accuracy_level"), "INT")
MatMulNBits = _contrib("MatMulNBits", ("T", "Q", "T"), _INTS)
FusedMatMul = _contrib("FusedMatMul", ("T", "T"), {"transA": "INT", "transB": "INT", "alpha": "FLOAT"})
ACCURACY_LEVEL = 4  # activations int8 per block; level 0 (float32) is 100 times slower at 8 bit


def linear(x, weight, scale, bits: int, group: int):
    if scale is None:
        return FusedMatMul(x, weight, transB=1)
    columns = x.shape[-1]
    return MatMulNBits(
        x, weight, scale, K=columns, N=weight.shape[0], bits=bits, block_size=group, accuracy_level=ACCURACY_LEVEL
    )


def rms(x, weight, eps: float):
    ones = _constant(np.ones(x.shape[-1], np.float32)) if weight is None else weight
    return std.RMSNormalization(x, ones, axis=-1, epsilon=eps)


def rope(x, cos, sin):
    heads, dim = x.shape[1:]
    rows = std.Reshape(x, _ints(1, -1, heads * dim))
    rotated = std.RotaryEmbedding(rows, _half(cos, dim), _half(sin, dim), num_heads=heads)
    return std.Reshape(rotated, _ints(-1, heads, dim))


def gelu(x):
    return std.Gelu(x, approximate="tanh")


def attend(q, k_past, v_past, k_tail=None, v_tail=None, mask_past=None, mask_tail=None, k_scale=None, v_scale=None):
    (heads, dim), kv = q.shape[1:], k_past.shape[1]
    q = _by_kv_head(q, kv)
    past = _scores(q, k_past, mask_past, k_scale)
    if k_tail is None:  # the drafter
        out = std.MatMul(_scaled(std.Softmax(past, axis=-1), v_scale), _rows_by_head(v_past))
    else:
        weights = std.Softmax(std.Concat(_scores(q, k_tail, mask_tail), past, axis=-1), axis=-1)
        chunk = _ints(k_tail.shape[0])  # two products, so that V is never concatenated
        of_tail = std.MatMul(std.Slice(weights, _ints(0), chunk, _ints(-1)), _rows_by_head(v_tail))
        of_past = _scaled(std.Slice(weights, chunk, _ints(1 << 40), _ints(-1)), v_scale)
        of_past = std.MatMul(of_past, _rows_by_head(v_past))
        out = std.Add(of_tail, of_past)
    if kv > 1:
        out = std.Transpose(std.Reshape(out, _ints(kv, -1, heads // kv, dim)), perm=[1, 0, 2, 3])
    return std.Reshape(out, _ints(-1, heads * dim))


def _by_kv_head(q, kv: int):
    """[T, n, D] -> [kv, T * g, D]"""
    heads, dim = q.shape[1:]
    if kv == 1:
        return std.Reshape(q, _ints(1, -1, dim))
    grouped = std.Transpose(std.Reshape(q, _ints(-1, kv, heads // kv, dim)), perm=[1, 0, 2, 3])
    return std.Reshape(grouped, _ints(kv, -1, dim))


def _rows_by_head(rows):
    """[P, kv, D] -> float32 [kv, P, D]; one float32 head is a view. onnxruntime merges the equal ones."""
    kv, dim = rows.shape[1:]
    by_head = std.Reshape(rows, _ints(1, -1, dim)) if kv == 1 else std.Transpose(rows, perm=[1, 0, 2])
    return by_head if rows.dtype == ir.DataType.FLOAT else std.Cast(by_head, to=int(ir.DataType.FLOAT))


def _scores(q, k, mask, scale=None):
    scores = _scaled(FusedMatMul(q, _rows_by_head(k), transB=1), scale)
    return scores if mask is None else std.Add(scores, mask)


def _scaled(columns, scale):
    """columns [kv, R * g, P], scale [P, kv] of the rows that they belong to: P factors where a row would take D"""
    return columns if scale is None else std.Mul(columns, std.Unsqueeze(std.Transpose(scale, perm=[1, 0]), _ints(1)))


def _half(table, dim: int):
    """cos or sin [T, D] -> [1, T, D/2]; onnxruntime merges the equal ones"""
    return std.Unsqueeze(std.Slice(table, _ints(0), _ints(dim // 2), _ints(1)), _ints(0))


def _constant(array: np.ndarray):
    return std.Constant(value=onnx.numpy_helper.from_array(array))


def _ints(*values: int):
    return _constant(np.array(values, np.int64))


TABLE = {getattr(torch.ops.gemma4, f.__name__).default: f for f in (linear, rms, rope, gelu, attend)}


def pack(q: Tensor, bits: int, group: int) -> Tensor:
    """int8 [O, I] -> MatMulNBits' B: uint8 [O, ceil(I / group), group * bits / 8], zero point 2^(bits-1), low first."""
    zero = 1 << (bits - 1)
    q = F.pad(q, (0, -q.shape[1] % group))
    stored = (q.to(torch.int16) + zero).to(torch.uint8).view(q.shape[0], -1, group)
    return stored if bits == 8 else stored[..., 0::2] | (stored[..., 1::2] << 4)


def write(
    graph: nn.Module,
    program: ExportedProgram,
    weights: Weights,
    folder: Path,
    errors: list[TensorError],
    say: Callable[[str], None],
) -> Placement:
    """folder/<graph>.onnx and folder/<graph>.onnx.data -> where each weight lies in the data file.

    Placement: buffer -> (offset in bytes, dtype, shape as stored).
    """
    path = folder / f"{graph.name}.onnx"
    data = path.with_suffix(".onnx.data")
    say("graph")
    _pack_shapes(program)
    model = _to_onnx(graph, program)
    state = tuple(weights.state(graph))
    if any(spec and spec.width(0) > WIDEST_ALIKE[spec.bits] for _, _, spec in state):
        _run_in_pairs(model)
    placement = _place(model, data)
    ir.save(model, path)
    say("weights")
    with open(data, "wb") as file:
        for buffer, ref, spec in state:
            _write_weight(file, placement, buffer, weights.stream(ref, spec, f"{graph.name}.{buffer}", errors), spec)
    return placement


def _pack_shapes(program: ExportedProgram) -> None:
    """Give every quantized weight of the program the shape that `pack` will give its values."""
    names = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.target}
    for node in program.graph.nodes:
        if node.target is torch.ops.gemma4.linear.default and node.args[2] is not None:
            _, weight, _, bits, group = node.args
            with weight.meta["val"].fake_mode:
                weight.meta["val"] = pack(torch.empty(weight.meta["val"].shape, dtype=torch.int8), bits, group)
            program.state_dict[names[weight.name]] = weight.meta["val"]


def _to_onnx(graph: nn.Module, program: ExportedProgram) -> ir.Model:
    """Program -> optimized model with our names for inputs and outputs; its weights have no values yet."""
    with warnings.catch_warnings(), _quiet("torch.onnx", "onnxscript", "onnx_ir"), _nothing_twice():
        warnings.simplefilter("ignore")
        model = torch.onnx.export(
            program, (), dynamo=True, optimize=False, verbose=False, opset_version=OPSET, custom_translation_table=TABLE
        ).model
        for name, value in model.graph.initializers.items():
            if name in program.state_dict:
                value.const_value = None
        onnxscript.optimizer.optimize_ir(model, num_iterations=1)  # a second finds nothing more
    for values, specs in ((model.graph.inputs, graph.inputs), (model.graph.outputs, graph.outputs)):
        for value, spec in zip(values, specs, strict=True):
            value.name, value.shape = spec.name, ir.Shape(spec.shape)
    for node in model.graph:
        node.metadata_props.clear()  # source paths of the machine that exported
        for value in node.outputs:
            value.metadata_props.clear()
            if not value.is_graph_output():
                value.shape = None  # names of torch's symbols; onnxruntime infers its own
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    return model


def _run_in_pairs(model: ir.Model) -> None:
    """An odd number of rows is padded with a row of zeros, whose results are cut off again.

    In wide blocks onnxruntime multiplies rows by twos, and an odd last one in another order. With it a pair costs less
    than two rows alone, and one row less than in narrow blocks (README, Quantization).
    """
    graph = model.graph
    symbol = graph.inputs[0].shape[0]
    ops: list[ir.Node] = []

    def add(op: str, inputs: list[ir.Value], **attributes: int | float) -> ir.Value:
        ops.append(ir.node(op, inputs, attributes))
        return ops[-1].outputs[0]

    def ints(*values: int) -> ir.Value:
        ops.append(ir.node("Constant", [], {"value": ir.tensor(np.array(values, np.int64))}))
        return ops[-1].outputs[0]

    rows = add("Shape", [graph.inputs[0]], start=0, end=1)
    odd = add("Mod", [rows, ints(2)])
    for value in graph.inputs:
        for axis, size in enumerate(value.shape):
            if many := _rows_of(size, symbol):
                users = value.uses()
                padding = add("Concat", [ints(0), add("Mul", [odd, ints(many)])], axis=0)
                padded = add("Pad", [value, padding, add("Constant", [], value_float=0.0), ints(axis)])
                for node, index in users:
                    if node not in ops:
                        node.replace_input_with(index, padded)
    graph.insert_before(graph[0], ops)
    ops.clear()
    for index, value in enumerate(graph.outputs):
        if value.shape[0] == symbol:
            cut = add("Slice", [value, ints(0), rows, ints(0)])
            cut.name, cut.shape, cut.type, value.name = value.name, value.shape, value.type, f"{value.name}.in_pairs"
            value.shape, graph.outputs[index] = None, cut
    graph.extend(ops)


def _rows_of(size: int | ir.SymbolicDim, symbol: ir.SymbolicDim) -> int:
    """Positions of a dimension for one row: 1 of "T", 4 of "4*T", none of "P_full"."""
    many, _, name = str(size).rpartition("*")
    return int(many or 1) if name == str(symbol) else 0


def _place(model: ir.Model, data: Path) -> Placement:
    """Give every weight its bytes in the external data file, in the graph's order."""
    placement, offset = {}, 0
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            continue  # a small constant of the graph itself
        shape = tuple(value.shape.numpy())
        size = math.prod(shape) * int(value.dtype.itemsize)
        offset += -offset % (PAGE_BYTES if size >= PAGE_BYTES else LINE_BYTES)
        placement[name] = offset, value.dtype.numpy().name, shape
        value.const_value = ir.ExternalTensor(
            data.name, offset, size, value.dtype, shape=value.shape, name=name, base_dir=data.parent
        )
        value.metadata_props.clear()
        offset += size
    return placement


def _write_weight(
    file: BinaryIO, placement: Placement, buffer: str, chunks: Iterable[Chunk], spec: QuantSpec | None
) -> None:
    for chunk in chunks:
        values = pack(chunk.values, spec.bits, spec.width(chunk.values.shape[1])) if spec else chunk.values
        _write_rows(file, placement[buffer], chunk.start, values)
        if chunk.scale is not None:
            _write_rows(file, placement[buffer.removesuffix("weight") + "scale"], chunk.start, chunk.scale)


def _write_rows(file: BinaryIO, place: tuple[int, str, tuple[int, ...]], start: int, rows: Tensor) -> None:
    array = np.ascontiguousarray(rows.numpy())
    file.seek(place[0] + start * (array.nbytes // len(array)))
    file.write(array.data)


@contextmanager
def _nothing_twice() -> Iterator[None]:
    """The exporter traces a program anew to decompose it, and parses its library of operations anew for every program,
    two thirds of its time. Ours holds nothing that has to be decomposed, and the library stays what it is."""
    with (
        mock.patch.object(ExportedProgram, "run_decompositions", lambda program, *args, **options: program),
        mock.patch.object(onnxscript_apis, "get_torchlib_ops", _torchlib_ops),
    ):
        yield


@contextmanager
def _quiet(*loggers: str) -> Iterator[None]:
    """The converter logs a line for each weight without a value; ours have none on purpose."""
    found = [logging.getLogger(name) for name in loggers]
    levels = [logger.level for logger in found]
    for logger in found:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(found, levels, strict=True):
            logger.setLevel(level)
