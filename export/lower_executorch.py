"""Exported program -> .pte for ExecuTorch, one XNNPACK delegate: what every gemma4 operation becomes for its partitioner.

XNNPACK's own rules shape the table: no int64 inputs, views with one unknown size, one quantize chain per linear, zero
points as buffers, gelu written out (its own is the erf form), the mean of a norm as a product with ones / D.

Weights are fake while the program is decomposed. Then each gets its values in a mapped file, which ExecuTorch's copies of
the program share, and what it collects for the .pte stays in files too: no second copy is ever held in memory.
"""

import collections
import hashlib
import mmap
import operator
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed
from executorch.backends.xnnpack._passes import XNNPACKPassManager
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir._serialize._cord import FileBackedData
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.pass_base import ExportPass
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass
from torch import Tensor, nn
from torch._export.passes.replace_view_ops_with_view_copy_ops_pass import (
    ReplaceViewOpsWithViewCopyOpsPass,
    get_view_copy_of_view_op,
)
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node
from torch.fx.passes.infra.pass_base import PassResult
from torch.fx.traceback import NodeSource

from . import ops  # noqa: F401  registers gemma4
from .lower_onnx import Placement
from .pte_head import find_head
from .quant import TensorError
from .weights import Weights
from .xnnpack import Partitioner

aten, quantized = torch.ops.aten, torch.ops.quantized_decomposed
SPILL_BYTES = 1 << 16  # constants from this size on wait in files
PASSES = ("XNNPACKRemoveCloneOpsTransform", "ConvertToLinearPass", "RemoveGetItemPass")
IDLE = (  # passes of ExecuTorch's own that find nothing to do in our programs
    *("NormalizeTransposePass", "ReplaceBrokenOpsWithFunctionalOpsPass", "SymToTensorPass"),
    *("RemoveMixedTypeOperators", "LegalizePortableDimOrderPass"),
)


class Builder:
    """Adds nodes with fake values at the insertion point. `once` keeps what several operations share."""

    def __init__(self, program: ExportedProgram):
        self.program, self.graph = program, program.graph
        self._memo: dict = {}
        self._fake = next(node.meta["val"].fake_mode for node in self.graph.nodes if node.op == "placeholder")

    def __call__(self, operation, *args, **options) -> Node:
        node = self.graph.call_function(operation, args, options)
        with self._fake:
            node.meta["val"] = operation(*torch.fx.node.map_arg(args, lambda arg: arg.meta["val"]), **options)
        return node

    def once(self, key, make: Callable[[], Node]) -> Node:
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def constant(self, name: str, make: Callable[[], Tensor]) -> Node:
        """A buffer of the program that several operations share."""
        return self.once(name, lambda: self._add_buffer(name, make()))

    def _add_buffer(self, name: str, value: Tensor) -> Node:
        specs = self.program.graph_signature.input_specs
        at = sum(spec.kind != InputKind.USER_INPUT for spec in specs)
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        with self.graph.inserting_before(placeholders[at]):
            node = self.graph.placeholder(f"b_{name}")
        node.meta["val"] = self._fake.from_tensor(value, static_shapes=True)
        specs.insert(at, InputSpec(InputKind.BUFFER, TensorArgument(node.name), name, True))
        self.program.state_dict[name] = value
        return node


def _shape(node: Node) -> torch.Size:
    return node.meta["val"].shape


def linear(b: Builder, x, weight, scale, bits: int, group: int):
    if scale is None:
        return b(aten.linear.default, x, weight)
    params = b(quantized.choose_qparams_per_token_asymmetric.default, x, torch.int8)
    chain = b(operator.getitem, params, 0), b(operator.getitem, params, 1), -128, 127, torch.int8
    q = b(quantized.quantize_per_token.default, x, *chain)
    x = b(quantized.dequantize_per_token.default, q, *chain, torch.float32)
    rows, groups = _shape(scale)
    if bits == 8:
        zero = b.constant(f"zero_{rows}", lambda: torch.zeros(rows, dtype=torch.int64))
        scale = b.once((scale, "flat"), lambda: _flatten(b, scale))
        weight = b(quantized.dequantize_per_channel.default, weight, scale, zero, 0, -127, 127, torch.int8)
    else:
        zero = b.constant(f"zero_{rows}_{groups}", lambda: torch.zeros(rows, groups, dtype=torch.int32))
        dequantize = quantized.dequantize_per_channel_group.default
        weight = b(dequantize, weight, scale, zero, -8, 7, torch.int8, group, torch.float32)
    return b(aten.linear.default, x, weight)


def _flatten(b: Builder, scale: Node) -> Node:
    """A buffer [O, 1] becomes [O], as dequantize_per_channel wants it."""
    names = {spec.arg.name: spec.target for spec in b.program.graph_signature.input_specs if spec.target}
    name = names[scale.name]
    b.program.state_dict[name] = b.program.state_dict[name].reshape(-1)
    with scale.meta["val"].fake_mode:
        scale.meta["val"] = scale.meta["val"].reshape(-1)
    return scale


def rms(b: Builder, x, weight, eps: float):
    size = _shape(x)[-1]
    ones = b.constant(f"mean_{size}", lambda: torch.full((1, size), 1 / size))
    mean = b(aten.linear.default, b(aten.mul.Tensor, x, x), ones)
    normed = b(aten.mul.Tensor, x, b(aten.rsqrt.default, b(aten.add.Tensor, mean, eps)))
    return normed if weight is None else b(aten.mul.Tensor, normed, weight)


def rope(b: Builder, x, cos, sin):
    dim = _shape(x)[-1]
    turned = b(aten.linear.default, x, b.constant(f"rotate_{dim}", lambda: _rotation(dim)))
    cos, sin = (
        b.once((part, "rows"), lambda part=part: b(aten.view.default, part, [-1, 1, dim])) for part in (cos, sin)
    )
    return b(aten.add.Tensor, b(aten.mul.Tensor, x, cos), b(aten.mul.Tensor, turned, sin))


def _rotation(dim: int) -> Tensor:
    """r [D, D] with x @ r.T = (-x[D/2:], x[:D/2])"""
    rotation, i = torch.zeros(dim, dim), torch.arange(dim // 2)
    rotation[i, i + dim // 2], rotation[i + dim // 2, i] = -1.0, 1.0
    return rotation


def gelu(b: Builder, x):
    cube = b(aten.mul.Tensor, b(aten.mul.Tensor, x, x), x)
    inner = b(aten.mul.Tensor, b(aten.add.Tensor, x, b(aten.mul.Tensor, cube, 0.044715)), (2 / torch.pi) ** 0.5)
    return b(aten.mul.Tensor, b(aten.mul.Tensor, x, 0.5), b(aten.add.Tensor, b(aten.tanh.default, inner), 1.0))


def attend(
    b: Builder, q, k_past, v_past, k_tail=None, v_tail=None, mask_past=None, mask_tail=None, k_scale=None, v_scale=None
):
    (heads, dim), kv = _shape(q)[1:], _shape(k_past)[1]
    k_past, v_past = _float(b, k_past), _float(b, v_past)
    turned = b(aten.permute.default, _by_kv_head(b, q, kv), [0, 2, 1])
    past = _scores(b, k_past, turned, mask_past, k_scale)
    if k_tail is None:  # the drafter
        weights = _scaled(b, b(aten._softmax.default, past, -1, False), v_scale)
        out = b(aten.bmm.default, weights, _rows_by_head(b, v_past))
    else:
        scores = b(aten.cat.default, [_scores(b, k_tail, turned, mask_tail), past], -1)
        weights, chunk = b(aten._softmax.default, scores, -1, False), _shape(k_tail)[0]
        of_tail = b(aten.bmm.default, b(aten.slice.Tensor, weights, 2, 0, chunk), _rows_by_head(b, v_tail))
        of_past = _scaled(b, b(aten.slice.Tensor, weights, 2, chunk), v_scale)
        of_past = b(aten.bmm.default, of_past, _rows_by_head(b, v_past))
        out = b(aten.add.Tensor, of_tail, of_past)
    if kv > 1:
        out = _swap(b, b(aten.view.default, out, [kv, -1, heads // kv, dim]))
    return b(aten.view.default, out, [-1, heads * dim])


def _by_kv_head(b: Builder, q, kv: int):
    """[T, n, D] -> [kv, T * g, D]"""
    heads, dim = _shape(q)[1:]
    if kv == 1:
        return b(aten.view.default, q, [1, -1, dim])
    return b(aten.view.default, _swap(b, b(aten.view.default, q, [-1, kv, heads // kv, dim])), [kv, -1, dim])


def _swap(b: Builder, x):
    """Exchange the first two dimensions. permute, not permute_copy: the fake form of that one pins dynamic sizes."""
    return b(aten.clone.default, b(aten.permute.default, x, [1, 0, 2, 3]), memory_format=torch.contiguous_format)


def _rows_by_head(b: Builder, rows):
    """[P, kv, D] -> [kv, P, D]; one head is a view"""
    kv, dim = _shape(rows)[1:]
    if kv == 1:
        return b.once((rows, "heads"), lambda: b(aten.view.default, rows, [1, -1, dim]))
    return b.once((rows, "heads"), lambda: b(aten.permute.default, rows, [1, 0, 2]))


def _float(b: Builder, rows):
    """Past rows of a narrower type: a convert of XNNPACK's, once for all layers that read a donor."""
    dtype = rows.meta["val"].dtype
    if dtype == torch.float32:
        return rows
    if dtype == torch.float16:
        return b.once((rows, "float"), lambda: b(aten._to_copy.default, rows, dtype=torch.float32))
    unit = 1.0, 0, -128, 127, torch.int8  # scale, zero point, range: the rows' own scales come later
    return b.once((rows, "float"), lambda: b(quantized.dequantize_per_tensor.default, rows, *unit))


def _scaled(b: Builder, columns, scale):
    """columns [kv, R * g, P], scale [P, kv] of the rows that they belong to: P factors where a row would take D."""
    if scale is None:
        return columns
    rows = b.once((scale, "heads"), lambda: _columns_by_head(b, scale))
    return b(aten.mul.Tensor, columns, rows)


def _columns_by_head(b: Builder, scale):
    """[P, kv] -> [kv, 1, P]"""
    kv = _shape(scale)[1]
    if kv == 1:
        return b(aten.view.default, scale, [1, 1, -1])
    return b(aten.permute.default, b(aten.view.default, scale, [1, -1, kv]), [2, 0, 1])


def _scores(b: Builder, k, turned, mask, scale=None):
    """K as the left operand: XNNPACK packs the right one on every call."""
    scores = b(aten.permute.default, b(aten.bmm.default, _rows_by_head(b, k), turned), [0, 2, 1])
    scores = _scaled(b, scores, scale)
    return scores if mask is None else b(aten.add.Tensor, scores, mask)


TABLE = {getattr(torch.ops.gemma4, f.__name__).default: f for f in (linear, rms, rope, gelu, attend)}


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Replace every gemma4 operation by the table's nodes."""
    builder = Builder(program)
    for node in list(program.graph.nodes):
        if node.target in TABLE:
            with program.graph.inserting_before(node):
                made = TABLE[node.target](builder, *node.args, **node.kwargs)
            node.replace_all_uses_with(made)
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph.lint()
    program.graph_module.recompile()
    return program


def write(
    graph: nn.Module,
    program: ExportedProgram,
    weights: Weights,
    folder: Path,
    errors: list[TensorError],
    say: Callable[[str], None],
) -> Placement:
    """folder/<graph>.pte -> where the rows and scales of a head lie in it, as far as they are found.

    Placement: buffer -> (offset in bytes, dtype, shape as stored). ValueError if an operation stays outside the one
    XNNPACK delegate.
    """
    path = folder / f"{graph.name}.pte"
    with ExitStack() as stack:
        constants = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix=".constants-")))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of torch's and ExecuTorch's own calls to each other
        stack.enter_context(_spilled(constants))
        stack.enter_context(_shared_constants())
        stack.enter_context(_short_provenance())
        stack.enter_context(_no_retracing())
        say("weights")
        decompose(program)
        maps = _fill(graph, program, weights, constants, errors)
        _release(maps)
        say("lower")
        edge = to_edge_transform_and_lower(
            {"forward": program},
            partitioner=[Partitioner()],
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )
        delegates, outside = census(edge.exported_program("forward").graph_module)
        if delegates != 1 or outside:
            raise ValueError(f"{graph.name}: {delegates} XNNPACK delegates, operations outside: {outside or 'none'}")
        say("plan")
        lowered = edge.to_executorch(
            ExecutorchBackendConfig(
                extract_delegate_segments=True,
                sym_shape_eval_pass=ConstraintBasedSymShapeEvalPass(),
                memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False),
            )
        )
        say("write")
        with open(path, "wb") as file:
            lowered.write_to_file(file)
        _release(maps)
        return find_head(path, graph.lm_head.spec, program.state_dict) if hasattr(graph, "lm_head") else {}


def _fill(
    graph: nn.Module, program: ExportedProgram, weights: Weights, folder: Path, errors: list[TensorError]
) -> list[mmap.mmap]:
    """Real values for the program's fake weights, each in a mapped file of its own -> the maps.

    XNNPACK's cache of packed weights is keyed by the bytes of a constant: two of equal bytes with another shape or other
    scales would be taken for one, so they are refused.
    """
    seen: dict[bytes, tuple[str, tuple]] = {}
    maps = []
    for number, (buffer, ref, spec) in enumerate(weights.state(graph)):
        scale = buffer.removesuffix("weight") + "scale"
        fake = program.state_dict[buffer]
        maps.append(_map(folder / f"{number}.bin", fake.nbytes))
        values = torch.frombuffer(maps[-1], dtype=fake.dtype).view(fake.shape)
        scales = torch.empty(program.state_dict[scale].shape) if spec else None
        digest = hashlib.sha256()
        for chunk in weights.stream(ref, spec, f"{graph.name}.{buffer}", errors):
            rows = slice(chunk.start, chunk.start + len(chunk.values))
            values[rows] = chunk.values
            digest.update(values[rows].numpy().data)
            if spec:
                scales[rows] = chunk.scale.view(scales[rows].shape)
        program.state_dict[buffer] = values
        if spec:
            program.state_dict[scale] = scales
        form = values.shape, scales.numpy().tobytes() if spec else None
        twin, same_form = seen.setdefault(digest.digest(), (buffer, form))
        if same_form != form:
            raise ValueError(
                f"{graph.name}: {buffer} and {twin} have equal bytes and another form; XNNPACK mixes them up"
            )
    return maps


def _map(path: Path, size_bytes: int) -> mmap.mmap:
    with open(path, "w+b") as file:
        file.truncate(size_bytes)
        return mmap.mmap(file.fileno(), size_bytes)


def _release(maps: list[mmap.mmap]) -> None:
    """Pages that stay mapped count as memory; what is in them is in the file."""
    for view in maps:
        view.madvise(mmap.MADV_DONTNEED)


@contextmanager
def _spilled(folder: Path) -> Iterator[None]:
    """ExecuTorch holds every constant in memory until the file is written; let big ones wait in files."""
    add = NamedDataStore.add_named_data

    def add_named_data(store: NamedDataStore, key: str, data, *args, **options) -> None:
        if isinstance(data, bytes) and len(data) >= SPILL_BYTES and key not in store.key_to_buffer_idx:
            path = folder / f"{hashlib.sha256(key.encode()).hexdigest()}.spilled"
            path.write_bytes(data)
            data = FileBackedData(str(path))
        add(store, key, data, *args, **options)

    with mock.patch.object(NamedDataStore, "add_named_data", add_named_data):
        yield


@contextmanager
def _shared_constants() -> Iterator[None]:
    """ExecuTorch copies a program with all of its weights before a delegate takes it; nobody writes to them."""
    copy = Tensor.__deepcopy__

    def deepcopy(self: Tensor, memo: dict) -> Tensor:
        return self if type(self) is Tensor and self.nbytes >= SPILL_BYTES else copy(self, memo)

    with mock.patch.object(Tensor, "__deepcopy__", deepcopy):
        yield


@contextmanager
def _short_provenance() -> Iterator[None]:
    """torch.fx copies a growing history of every node in every pass, most of the time of a lowering; keep one link."""
    full = NodeSource.__init__

    def short(self: NodeSource, node: Node | None, pass_name: str = "", action=None) -> None:
        full(self, None, pass_name, action)
        if node is not None:
            self.node_info = self.NodeInfo(name=node.name, target=str(node.target), graph_id=id(node.graph))

    with mock.patch.object(NodeSource, "__init__", short):
        yield


@contextmanager
def _no_retracing() -> Iterator[None]:
    """ExecuTorch traces a program anew to decompose it and in each of its own and XNNPACK's passes, three quarters of the
    time of a lowering. Ours is functional and decomposed, and few passes find something to do in it: without the others
    the files are the same, byte for byte."""
    make, call = XNNPACKPassManager.__init__, ExportPass.call

    def only_needed(self: XNNPACKPassManager, program: ExportedProgram, passes: list | None = None) -> None:
        make(self, program, passes)
        self.passes = [each for each in self.passes if each.__name__ in PASSES]

    def unless_idle(self: ExportPass, module: torch.fx.GraphModule) -> PassResult:
        return PassResult(module, False) if type(self).__name__ in IDLE else call(self, module)

    with (
        mock.patch.object(XNNPACKPassManager, "__init__", only_needed),
        mock.patch.object(ExportPass, "call", unless_idle),
        mock.patch.object(ReplaceViewOpsWithViewCopyOpsPass, "call", _views_to_copies),
        mock.patch.object(ExportedProgram, "run_decompositions", lambda program, *args, **options: program),
    ):
        yield


def _views_to_copies(_: ReplaceViewOpsWithViewCopyOpsPass, module: torch.fx.GraphModule) -> PassResult:
    """What the pass does, without tracing: those that follow trace what this leaves."""
    for node in module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            node.target = get_view_copy_of_view_op(node.target._schema) or node.target
    return PassResult(module, True)


def census(module: torch.fx.GraphModule) -> tuple[int, dict[str, int]]:
    """-> number of delegates, calls left outside by operation"""
    calls = [
        node.target for node in module.graph.nodes if node.op == "call_function" and node.target is not operator.getitem
    ]
    outside = [target for target in calls if target is not torch.ops.higher_order.executorch_call_delegate]
    return len(calls) - len(outside), dict(collections.Counter(map(str, outside)))
