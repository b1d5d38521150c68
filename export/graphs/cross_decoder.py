"""The target's KV-shared layers, final norm and head. Runs on R asked rows of the T rows of a self_decoder call."""

import torch
from torch import Tensor, nn

from runtime_py.manifest import CHUNK_ROWS, FULL, SLIDING, TensorSpec

from ..config import TargetConfig
from ..quant import Recipe
from .layers import (
    KV,
    Linear,
    Norm,
    Rope,
    TargetLayer,
    donor_inputs,
    mask_inputs,
    masks_of,
    open_chunk,
    open_donor_inputs,
    past_of,
    rope_inputs,
)

NAME = "cross_decoder"


def inputs(config: TargetConfig, kv_dtype: str) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("x", ("R", config.hidden_size)),
        TensorSpec("embeds", ("R", config.hidden_size)),
        *(TensorSpec(f"per_layer.{layer.index}", ("R", config.per_layer_input_size)) for layer in config.shared_layers),
        *rope_inputs(config, "R"),
        *mask_inputs(config, "R"),
        *donor_inputs(config, kv_dtype),
        *open_donor_inputs(config, "tail_", CHUNK_ROWS),
        *open_donor_inputs(config, "new_", "T"),
    )


def outputs(config: TargetConfig) -> tuple[TensorSpec, ...]:
    """logits soft-capped; hidden after the final norm: what the drafter reads."""
    return TensorSpec("logits", ("R", config.vocab_size)), TensorSpec("hidden", ("R", config.hidden_size))


class CrossDecoder(nn.Module):
    name = NAME

    def __init__(self, config: TargetConfig, recipe: Recipe, kv_dtype: str = "float32"):
        super().__init__()
        self.config, self.inputs, self.outputs = config, inputs(config, kv_dtype), outputs(config)
        self.kv_dtype = kv_dtype
        self.layers = nn.ModuleDict(
            {str(layer.index): TargetLayer(config, layer, NAME, recipe) for layer in config.shared_layers}
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.vocab_size, config.hidden_size, recipe, f"{NAME}.lm_head")

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        """args and result in the order of `inputs` and `outputs`"""
        given = {spec.name: arg for spec, arg in zip(self.inputs, args, strict=True)}
        rope = {kind: Rope(given[f"cos_{kind}"], given[f"sin_{kind}"]) for kind in (SLIDING, FULL)}
        masks = {kind: masks_of(given, kind) for kind in (SLIDING, FULL)}
        past = {kind: past_of(given, f"{{}}_{kind}", self.kv_dtype) for kind in (SLIDING, FULL)}
        tail = {
            kind: open_chunk(_open(given, "tail_", kind), given["place"], _open(given, "new_", kind))
            for kind in (SLIDING, FULL)
        }
        x = given["x"]
        for layer in self.config.shared_layers:
            i, kind = layer.index, layer.type
            x, _ = self.layers[str(i)](
                x, given["embeds"], given[f"per_layer.{i}"], rope[kind], past[kind], tail[kind], masks[kind]
            )
        hidden = self.norm(x)
        logits = self.lm_head(hidden)
        if cap := self.config.logit_softcap:
            logits = torch.tanh(logits * (1 / cap)) * cap
        return logits, hidden


def _open(given: dict[str, Tensor], prefix: str, kind: str) -> KV:
    return KV(given[f"{prefix}k_{kind}"], given[f"{prefix}v_{kind}"])
