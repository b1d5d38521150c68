"""The MTP drafter: one drafted token from the last token's embedding and the recurrent state.

Every layer attends to the committed rows of the target's donors. The centroid head is the host's; a dense head is
part of the graph.
"""

from torch import Tensor, nn

from runtime_py.manifest import FULL, SLIDING, TensorSpec

from ..config import DrafterConfig
from ..quant import Recipe
from .layers import DrafterLayer, Linear, Norm, Rope, donor_inputs, past_of, rope_inputs

NAME = "drafter"


def inputs(config: DrafterConfig, kv_dtype: str) -> tuple[TensorSpec, ...]:
    """pair: the scaled target embedding of the last token, then the target's hidden row or the drafter's own state."""
    pair = TensorSpec("pair", (1, 2 * config.backbone_hidden_size))
    return pair, *rope_inputs(config, 1), *donor_inputs(config, kv_dtype)


def outputs(config: DrafterConfig) -> tuple[TensorSpec, ...]:
    """hidden after the final norm; state = its projection, the next step's second half of `pair`."""
    hidden, state = TensorSpec("hidden", (1, config.hidden_size)), TensorSpec("state", (1, config.backbone_hidden_size))
    return (hidden, state) if config.num_centroids else (hidden, state, TensorSpec("logits", (1, config.vocab_size)))


class Drafter(nn.Module):
    name = NAME

    def __init__(self, config: DrafterConfig, recipe: Recipe, kv_dtype: str = "float32"):
        super().__init__()
        self.config, self.inputs, self.outputs = config, inputs(config, kv_dtype), outputs(config)
        self.kv_dtype = kv_dtype
        hidden, backbone = config.hidden_size, config.backbone_hidden_size
        self.pre_projection = Linear(hidden, 2 * backbone, recipe, f"{NAME}.pre_projection")
        self.layers = nn.ModuleDict(
            {str(layer.index): DrafterLayer(config, layer, NAME, recipe) for layer in config.layers}
        )
        self.norm = Norm(hidden, config.rms_norm_eps)
        self.post_projection = Linear(backbone, hidden, recipe, f"{NAME}.post_projection")
        if not config.num_centroids:
            self.lm_head = Linear(config.vocab_size, hidden, recipe, f"{NAME}.lm_head")

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        """args and result in the order of `inputs` and `outputs`"""
        given = {spec.name: arg for spec, arg in zip(self.inputs, args, strict=True)}
        rope = {kind: Rope(given[f"cos_{kind}"], given[f"sin_{kind}"]) for kind in (SLIDING, FULL)}
        past = {kind: past_of(given, f"{{}}_{kind}", self.kv_dtype) for kind in (SLIDING, FULL)}
        x = self.pre_projection(given["pair"])
        for layer in self.config.layers:
            x = self.layers[str(layer.index)](x, rope[layer.type], past[layer.type])
        hidden = self.norm(x)
        state = self.post_projection(hidden)
        return (hidden, state) if self.config.num_centroids else (hidden, state, self.lm_head(hidden))
