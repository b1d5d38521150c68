"""The target's KV-shared layers, final norm and head. Runs on R asked rows of the T rows of a self_decoder call."""

import torch
from torch import Tensor, nn

from runtime_py.manifest import FULL, SLIDING, TensorSpec

from ..config import TargetConfig
from ..quant import Recipe
from .layers import KV, Linear, Masks, Norm, Rope, TargetLayer, donor_inputs, mask_inputs, rope_inputs

NAME = "cross_decoder"


def inputs(config: TargetConfig) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("x", ("R", config.hidden_size)),
        TensorSpec("embeds", ("R", config.hidden_size)),
        *(TensorSpec(f"per_layer.{layer.index}", ("R", config.per_layer_input_size)) for layer in config.shared_layers),
        *rope_inputs(config, "R"),
        *mask_inputs(config, "R"),
        *donor_inputs(config),
        *donor_inputs(config, "new_", rows="T"),
    )


def outputs(config: TargetConfig) -> tuple[TensorSpec, ...]:
    """logits soft-capped; hidden after the final norm: what the drafter reads."""
    return TensorSpec("logits", ("R", config.vocab_size)), TensorSpec("hidden", ("R", config.hidden_size))


class CrossDecoder(nn.Module):
    name = NAME

    def __init__(self, config: TargetConfig, recipe: Recipe):
        super().__init__()
        self.config, self.inputs, self.outputs = config, inputs(config), outputs(config)
        self.layers = nn.ModuleDict(
            {str(layer.index): TargetLayer(config, layer, NAME, recipe) for layer in config.shared_layers}
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.vocab_size, config.hidden_size, recipe.spec(f"{NAME}.lm_head"))

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        """args and result in the order of `inputs` and `outputs`"""
        given = {spec.name: arg for spec, arg in zip(self.inputs, args, strict=True)}
        rope = {kind: Rope(given[f"cos_{kind}"], given[f"sin_{kind}"]) for kind in (SLIDING, FULL)}
        masks = {kind: Masks(given[f"mask_{kind}"], given["mask_new"]) for kind in (SLIDING, FULL)}
        past = {kind: KV(given[f"k_{kind}"], given[f"v_{kind}"]) for kind in (SLIDING, FULL)}
        new = {kind: KV(given[f"new_k_{kind}"], given[f"new_v_{kind}"]) for kind in (SLIDING, FULL)}
        x = given["x"]
        for layer in self.config.shared_layers:
            i, kind = layer.index, layer.type
            x, _ = self.layers[str(i)](
                x, given["embeds"], given[f"per_layer.{i}"], rope[kind], past[kind], new[kind], masks[kind]
            )
        hidden = self.norm(x)
        logits = self.lm_head(hidden)
        if cap := self.config.logit_softcap:
            logits = torch.tanh(logits * (1 / cap)) * cap
        return logits, hidden
