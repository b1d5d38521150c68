"""The target's layers that own keys and values: everything that writes the cache. Prefill runs this graph only.

"Self-decoder" and "cross-decoder" are the terms of YOCO (You Only Cache Once, arXiv 2405.05254).
"""

import itertools

from torch import Tensor, nn

from runtime_py.manifest import CHUNK_ROWS, FULL, SLIDING, TensorSpec

from ..config import TargetConfig
from ..quant import Recipe
from .layers import KV, Rope, TargetLayer, mask_inputs, masks_of, past_inputs, past_of, rope_inputs

NAME = "self_decoder"


def inputs(config: TargetConfig, kv_dtype: str) -> tuple[TensorSpec, ...]:
    own, kv = config.own_layers, config.kv_heads
    past = [past_inputs(f"past_{{}}.{layer.index}", layer.type, kv, layer.head_dim, kv_dtype) for layer in own]
    return (
        TensorSpec("embeds", ("T", config.hidden_size)),
        *(TensorSpec(f"per_layer.{layer.index}", ("T", config.per_layer_input_size)) for layer in own),
        *rope_inputs(config, "T"),
        *mask_inputs(config, "T"),
        *itertools.chain.from_iterable(zip(*past, strict=True)),  # k of all layers, then v
        *(TensorSpec(f"tail_{w}.{layer.index}", (CHUNK_ROWS, kv, layer.head_dim)) for w in "kv" for layer in own),
    )


def outputs(config: TargetConfig) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("x", ("T", config.hidden_size)),
        *(
            TensorSpec(f"new_{w}.{layer.index}", ("T", config.kv_heads, layer.head_dim))
            for w in "kv"
            for layer in config.own_layers
        ),
    )


class SelfDecoder(nn.Module):
    name = NAME

    def __init__(self, config: TargetConfig, recipe: Recipe, kv_dtype: str = "float32"):
        super().__init__()
        self.config, self.inputs, self.outputs = config, inputs(config, kv_dtype), outputs(config)
        self.kv_dtype = kv_dtype
        self.layers = nn.ModuleDict(
            {str(layer.index): TargetLayer(config, layer, NAME, recipe) for layer in config.own_layers}
        )

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        """args and result in the order of `inputs` and `outputs`"""
        given = {spec.name: arg for spec, arg in zip(self.inputs, args, strict=True)}
        rope = {kind: Rope(given[f"cos_{kind}"], given[f"sin_{kind}"]) for kind in (SLIDING, FULL)}
        masks = {kind: masks_of(given, kind) for kind in (SLIDING, FULL)}
        x, new = given["embeds"], []
        for layer in self.config.own_layers:
            i, kind = layer.index, layer.type
            past, tail = past_of(given, f"past_{{}}.{i}", self.kv_dtype), KV(given[f"tail_k.{i}"], given[f"tail_v.{i}"])
            x, rows = self.layers[str(i)](
                x, given["embeds"], given[f"per_layer.{i}"], rope[kind], past, tail, masks[kind], given["place"]
            )
            new.append(rows)
        return x, *(rows.k for rows in new), *(rows.v for rows in new)
