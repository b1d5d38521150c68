"""What the three graphs share: linear, norm, the decoder layer, and the shapes of their common inputs.

Module and buffer names are the checkpoint's, so that a graph's state is filled by name. Legend: T rows, H hidden_size,
D head_dim of the layer's type, kv key/value heads, g query heads per kv head, d per_layer_input_size, C CHUNK_ROWS.

The rows a token attends to come in two parts: the past, which are all closed chunks of C positions (of a sliding layer
the last `window` rows of them), and the tail, which is the open chunk with every position at a slot of its own. So a key
stands at the same place of the same sum whether its token is run alone or in a block, and float32 rounds it alike.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from runtime_py.manifest import CHUNK_ROWS, FULL, KV_PARTS, SLIDING, TensorSpec

from .. import ops  # noqa: F401  registers torch.ops.gemma4
from ..config import LayerConfig, TargetConfig, TextConfig
from ..quant import Recipe

gemma4 = torch.ops.gemma4


class Rope(NamedTuple):
    cos: Tensor  # [T, D]
    sin: Tensor  # [T, D]


class KV(NamedTuple):
    k: Tensor | None  # [rows, kv, D]
    v: Tensor | None
    k_scale: Tensor | None = None  # [rows, kv], of int8 rows
    v_scale: Tensor | None = None


class Masks(NamedTuple):
    past: Tensor | None  # [T * g, P] or [1, P]
    tail: Tensor | None  # [T * g, C]


def open_chunk(committed: KV, place: Tensor, new: KV) -> KV:
    """committed [C, kv, D], zero where nothing is committed; place [C, T], 1 where a new row's slot is; new [T, kv, D]."""
    chunk, kv, dim = committed.k.shape
    slots = place.view(1, chunk, -1)
    placed = (torch.bmm(slots, rows.view(1, -1, kv * dim)) for rows in (new.k, new.v))
    pairs = zip((committed.k, committed.v), placed, strict=True)
    return KV(*(old + rows.view(chunk, kv, dim) for old, rows in pairs))


class Linear(nn.Module):
    """Weight [O, I] in the form that the recipe has for `name`; spec None is float32."""

    def __init__(self, out_size: int, in_size: int, recipe: Recipe, name: str):
        super().__init__()
        spec = recipe.spec(name, in_size)
        self.spec, self.in_size = spec, in_size
        self.register_buffer("weight", torch.empty(out_size, in_size, dtype=torch.int8 if spec else torch.float32))
        self.register_buffer("scale", torch.empty(out_size, spec.groups(in_size)) if spec else None)

    def forward(self, x: Tensor) -> Tensor:
        bits, group = (self.spec.bits, self.spec.width(self.in_size)) if self.spec else (32, self.in_size)
        return gemma4.linear(x, self.weight, self.scale, bits, group)


class Norm(nn.Module):
    """RMS norm over the last dimension (Gemma4RMSNorm)."""

    def __init__(self, size: int, eps: float, with_weight: bool = True):
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.empty(size) if with_weight else None)

    def forward(self, x: Tensor) -> Tensor:
        return gemma4.rms(x, self.weight, self.eps)


class Attention(nn.Module):
    """Gemma4TextAttention. A layer that owns KV makes new rows, the others read their donor's."""

    def __init__(self, config: TextConfig, layer: LayerConfig, name: str, recipe: Recipe):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.query_heads, config.kv_heads, layer.head_dim
        wide, narrow = config.query_heads * layer.head_dim, config.kv_heads * layer.head_dim
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.q_proj = Linear(wide, hidden, recipe, f"{name}.q_proj")
        self.o_proj = Linear(hidden, wide, recipe, f"{name}.o_proj")
        self.q_norm = Norm(layer.head_dim, eps)
        if layer.owns_kv:
            self.k_proj = Linear(narrow, hidden, recipe, f"{name}.k_proj")
            self.v_proj = Linear(narrow, hidden, recipe, f"{name}.v_proj")
            self.k_norm = Norm(layer.head_dim, eps)
            self.v_norm = Norm(layer.head_dim, eps, with_weight=False)

    def new_rows(self, h: Tensor, rope: Rope) -> KV:
        """h [T, H] -> k, v [T, kv, D]"""
        k = self.k_norm(self.k_proj(h).view(-1, self.kv_heads, self.head_dim))
        v = self.v_norm(self.v_proj(h).view(-1, self.kv_heads, self.head_dim))
        return KV(gemma4.rope(k, *rope), v)

    def forward(self, h: Tensor, rope: Rope, past: KV, tail: KV, masks: Masks) -> Tensor:
        q = self.q_norm(self.q_proj(h).view(-1, self.heads, self.head_dim))
        scales = past.k_scale, past.v_scale
        return self.o_proj(gemma4.attend(gemma4.rope(q, *rope), past.k, past.v, tail.k, tail.v, *masks, *scales))


class MLP(nn.Module):
    """Gemma4TextMLP."""

    def __init__(self, hidden: int, intermediate: int, name: str, recipe: Recipe):
        super().__init__()
        self.gate_proj = Linear(intermediate, hidden, recipe, f"{name}.gate_proj")
        self.up_proj = Linear(intermediate, hidden, recipe, f"{name}.up_proj")
        self.down_proj = Linear(hidden, intermediate, recipe, f"{name}.down_proj")

    def forward(self, h: Tensor) -> Tensor:
        return self.down_proj(gemma4.gelu(self.gate_proj(h)) * self.up_proj(h))


class DecoderLayer(nn.Module):
    """Gemma4TextDecoderLayer without its per-layer input."""

    def __init__(self, config: TextConfig, layer: LayerConfig, graph: str, recipe: Recipe):
        super().__init__()
        self.name, self.owns_kv = f"{graph}.layers.{layer.index}", layer.owns_kv
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, layer, f"{self.name}.self_attn", recipe)
        self.mlp = MLP(hidden, layer.intermediate_size, f"{self.name}.mlp", recipe)
        self.input_layernorm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.pre_feedforward_layernorm = Norm(hidden, eps)
        self.post_feedforward_layernorm = Norm(hidden, eps)
        self.register_buffer("layer_scalar", torch.empty(1))

    def attention_and_mlp(
        self, x: Tensor, rope: Rope, past: KV, tail: KV, masks: Masks, place: Tensor | None
    ) -> tuple[Tensor, KV | None]:
        """x [T, H] -> x, the KV rows that this call adds. place [C, T] puts them into the tail; a layer that shares gets
        its donor's tail as it is and no place."""
        h, new = self.input_layernorm(x), None
        if self.owns_kv:
            new = self.self_attn.new_rows(h, rope)
            tail = open_chunk(tail, place, new)
        x = x + self.post_attention_layernorm(self.self_attn(h, rope, past, tail, masks))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))), new


class TargetLayer(DecoderLayer):
    """With the per-layer input: the layer projects its own part from the token embeddings (per_layer_model_projection
    split by output rows) and adds the token's row of the per-layer table."""

    def __init__(self, config: TargetConfig, layer: LayerConfig, graph: str, recipe: Recipe):
        super().__init__(config, layer, graph, recipe)
        hidden, size, eps = config.hidden_size, config.per_layer_input_size, config.rms_norm_eps
        self.projection_scale = hidden**-0.5
        self.per_layer_model_projection = Linear(size, hidden, recipe, f"{self.name}.per_layer_model_projection")
        self.per_layer_projection_norm = Norm(size, eps)
        self.per_layer_input_gate = Linear(size, hidden, recipe, f"{self.name}.per_layer_input_gate")
        self.per_layer_projection = Linear(hidden, size, recipe, f"{self.name}.per_layer_projection")
        self.post_per_layer_input_norm = Norm(hidden, eps)

    def forward(
        self,
        x: Tensor,
        embeds: Tensor,
        per_layer: Tensor,
        rope: Rope,
        past: KV,
        tail: KV,
        masks: Masks,
        place: Tensor | None = None,
    ) -> tuple[Tensor, KV | None]:
        """x, embeds [T, H]; per_layer [T, d]"""
        x, new = self.attention_and_mlp(x, rope, past, tail, masks, place)
        projected = self.per_layer_projection_norm(self.per_layer_model_projection(embeds) * self.projection_scale)
        gated = gemma4.gelu(self.per_layer_input_gate(x)) * ((projected + per_layer) * 2**-0.5)
        x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar, new


class DrafterLayer(DecoderLayer):
    """Reads committed rows only, so it needs neither a tail nor masks."""

    def forward(self, x: Tensor, rope: Rope, past: KV) -> Tensor:
        x, _ = self.attention_and_mlp(x, rope, past, KV(None, None), Masks(None, None), None)
        return x * self.layer_scalar


def times(factor: int, symbol: str) -> str:
    return symbol if factor == 1 else f"{factor}*{symbol}"


def rope_inputs(config: TextConfig, rows: int | str) -> list[TensorSpec]:
    return [
        TensorSpec(f"{f}_{kind}", (rows, config.head_dims[kind])) for kind in (SLIDING, FULL) for f in ("cos", "sin")
    ]


def mask_inputs(config: TextConfig, rows: str) -> list[TensorSpec]:
    """Additive masks, 0 or MASKED, a row per (token, query head of a group); then the new rows' slots in the tail."""
    return [
        TensorSpec("mask_past_sliding", (times(config.group, rows), "P_sliding")),
        TensorSpec("mask_past_full", (1, "P_full")),
        TensorSpec("mask_tail_sliding", (times(config.group, rows), CHUNK_ROWS)),
        TensorSpec("mask_tail_full", (times(config.group, rows), CHUNK_ROWS)),
        TensorSpec("place", (CHUNK_ROWS, "T")),
    ]


def masks_of(given: dict[str, Tensor], kind: str) -> Masks:
    return Masks(given[f"mask_past_{kind}"], given[f"mask_tail_{kind}"])


def past_inputs(name: str, kind: str, kv_heads: int, head_dim: int, dtype: str) -> list[TensorSpec]:
    """Past rows of a layer of that type, an input for each part of a row; name has {} where the part's name goes."""
    forms = {"k": ((head_dim,), dtype), "k_scale": ((), "float32")}
    forms |= {"v": forms["k"], "v_scale": forms["k_scale"]}
    parts = {part: forms[part] for part in KV_PARTS[dtype]}
    return [TensorSpec(name.format(part), (f"P_{kind}", kv_heads, *size), form) for part, (size, form) in parts.items()]


def donor_inputs(config: TextConfig, dtype: str) -> list[TensorSpec]:
    """Past rows of the donors of each type."""
    return [
        spec
        for kind in (SLIDING, FULL)
        for spec in past_inputs(f"{{}}_{kind}", kind, config.kv_heads, config.head_dims[kind], dtype)
    ]


def open_donor_inputs(config: TextConfig, prefix: str, rows: int | str) -> list[TensorSpec]:
    """k and v of the donors of each type: as many of their rows in the open chunk as `rows` says."""
    return [
        TensorSpec(f"{prefix}{w}_{kind}", (rows, config.kv_heads, config.head_dims[kind]))
        for kind in (SLIDING, FULL)
        for w in "kv"
    ]


def past_of(given: dict[str, Tensor], name: str, dtype: str) -> KV:
    """name as in `past_inputs`"""
    return KV(**{part: given[name.format(part)] for part in KV_PARTS[dtype]})
