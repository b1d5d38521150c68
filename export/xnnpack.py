"""What ExecuTorch's XNNPACK partitioner would leave outside of the delegate, though XNNPACK takes it: slices of any size and
changes of type."""

from executorch.backends.xnnpack.operators.node_visitor import NodeVisitor, register_node_visitor
from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
from executorch.backends.xnnpack.partition.config.generic_node_configs import (
    GenericNodePartitionerConfig,
    SliceCopyConfig,
)
from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.serialization.xnnpack_graph_schema import XNNConvert, XNNGraph, XNNStaticSlice, XNode
from torch.export import ExportedProgram
from torch.fx import Node

END = (1 << 31) - 1  # size of a slice that goes to a dimension's end


class AnySizeConfig(SliceCopyConfig):
    """ExecuTorch hands XNNPACK slices of fixed sizes only."""

    def check_constraints(self, node: Node, ep: ExportedProgram) -> bool:
        return self.check_common_constraints(node, ep)


@register_node_visitor
class SliceOfAnySize(NodeVisitor):
    """How a slice is written for XNNPACK: size 0 is a whole dimension, and what goes past a dimension's end is cut."""

    target = "aten.slice_copy.Tensor"

    def define_node(self, node: Node, xnn_graph: XNNGraph, vals_to_ids: dict[Node, int], debug_handle: int) -> None:
        self.define_nodes_tensor_inputs_outputs(node, xnn_graph, vals_to_ids)
        source, dim, start = node.args[:3]
        offsets, sizes = [0] * source.meta["val"].dim(), [0] * source.meta["val"].dim()
        offsets[dim], size = start, node.meta["val"].shape[dim]
        sizes[dim] = size if isinstance(size, int) else END
        ids = {"input_id": vals_to_ids[source], "output_id": vals_to_ids[node]}
        xnode = XNNStaticSlice(num_dims=len(sizes), offsets=offsets, sizes=sizes, flags=0, **ids)
        xnn_graph.xnodes.append(XNode(xnode_union=xnode, debug_handle=debug_handle))


class ConvertConfig(GenericNodePartitionerConfig):
    """ExecuTorch hands XNNPACK no change of type."""

    target_name = "_to_copy.default"

    def supported_precision_types(self) -> list[ConfigPrecisionType]:
        return [ConfigPrecisionType.FP32]


@register_node_visitor
class Convert(NodeVisitor):
    """How float16 to float32 is written for XNNPACK. ExecuTorch's own visitor knows a change of memory format alone."""

    target = "aten._to_copy.default"

    def define_node(self, node: Node, xnn_graph: XNNGraph, vals_to_ids: dict[Node, int], debug_handle: int) -> None:
        self.define_nodes_tensor_inputs_outputs(node, xnn_graph, vals_to_ids)
        xnode = XNNConvert(input_id=vals_to_ids[node.args[0]], output_id=vals_to_ids[node], flags=0)
        xnn_graph.xnodes.append(XNode(xnode_union=xnode, debug_handle=debug_handle))


class Partitioner(XnnpackPartitioner):
    """Every operation of ours is XNNPACK's as it is: nothing is to be decomposed, so nothing has to be looked at."""

    def __init__(self):
        configs = [AnySizeConfig if config is SliceCopyConfig else config for config in ALL_PARTITIONER_CONFIGS]
        super().__init__([*configs, ConvertConfig])

    def ops_to_not_decompose(self, program: ExportedProgram) -> tuple[list, None]:
        return super().ops_to_not_decompose(program)[0], None
