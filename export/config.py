"""Frozen configurations of target and drafter: every per-layer decision is made here, once.

Read through Transformers' config classes (a saved config.json leaves out keys that equal a class default), then
checked strictly: a feature that the graphs do not build is refused by name.
"""

import math
from dataclasses import dataclass

from runtime_py.manifest import FULL, SLIDING

MIN_WINDOW, MIN_CONTEXT = 5, 7  # below these no graph can be traced (trace.EXAMPLE_SIZES)
LAYER_TYPES = {"sliding_attention": SLIDING, "full_attention": FULL}


@dataclass(frozen=True)
class LayerConfig:
    """donor: the layer whose keys and values this one reads; its own index where it owns them."""

    index: int
    type: str
    head_dim: int
    intermediate_size: int
    donor: int

    @property
    def owns_kv(self) -> bool:
        return self.donor == self.index


@dataclass(frozen=True)
class TextConfig:
    """What target and drafter have in common. inv_freq: layer type -> rotary frequencies [head_dim / 2]."""

    vocab_size: int
    hidden_size: int
    query_heads: int
    kv_heads: int
    window: int
    rms_norm_eps: float
    layers: tuple[LayerConfig, ...]
    inv_freq: dict[str, tuple[float, ...]]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.query_heads // self.kv_heads

    @property
    def head_dims(self) -> dict[str, int]:
        return {layer.type: layer.head_dim for layer in self.layers}


@dataclass(frozen=True)
class TargetConfig(TextConfig):
    """embedding_scale: sqrt(hidden_size) rounded to the checkpoint's dtype (Gemma4TextScaledWordEmbedding)."""

    per_layer_input_size: int
    per_layer_scale: float
    embedding_scale: float
    logit_softcap: float | None
    max_context_tokens: int
    tied_head: bool

    @property
    def own_layers(self) -> tuple[LayerConfig, ...]:
        return tuple(layer for layer in self.layers if layer.owns_kv)

    @property
    def shared_layers(self) -> tuple[LayerConfig, ...]:
        return tuple(layer for layer in self.layers if not layer.owns_kv)

    @property
    def donors(self) -> dict[str, int]:
        """type -> last layer of that type with its own KV (Transformers kv_sharing_modes "store")."""
        return {layer.type: layer.index for layer in self.own_layers}


@dataclass(frozen=True)
class DrafterConfig(TextConfig):
    """num_centroids None: dense head. Layer donors are those of the target, by type."""

    backbone_hidden_size: int
    num_centroids: int | None
    centroid_top_k: int


def target_config(hf, dtype) -> TargetConfig:
    """hf: Gemma4TextConfig or Gemma4Config; dtype: the checkpoint's torch dtype. ValueError names what is unsupported."""
    text = _text_config(hf, ("gemma4_text", "gemma4"), "target")
    _refuse(text, "target")
    own = text.num_hidden_layers - text.num_kv_shared_layers
    types = [LAYER_TYPES[kind] for kind in text.layer_types]
    if not 0 < own < text.num_hidden_layers or set(types[:own]) != set(types) or len(set(types)) != 2:
        raise ValueError(
            f"target: num_kv_shared_layers {text.num_kv_shared_layers} of {text.num_hidden_layers} layers is not supported: "
            "layers with their own KV must hold both types, and at least one layer must share"
        )
    if not text.hidden_size_per_layer_input:
        raise ValueError("target: hidden_size_per_layer_input 0 (no per-layer input embeddings) is not supported")
    if text.vocab_size_per_layer_input != text.vocab_size:
        raise ValueError(
            f"target: vocab_size_per_layer_input {text.vocab_size_per_layer_input} != vocab_size {text.vocab_size}"
        )
    donors = {kind: own - 1 - types[:own][::-1].index(kind) for kind in types}
    layers = tuple(
        LayerConfig(
            index=i,
            type=kind,
            head_dim=text.per_layer_config[i].head_dim,
            intermediate_size=text.intermediate_size * (2 if text.use_double_wide_mlp and i >= own else 1),
            donor=i if i < own else donors[kind],
        )
        for i, kind in enumerate(types)
    )
    return TargetConfig(
        **_common(text, layers),
        per_layer_input_size=text.hidden_size_per_layer_input,
        per_layer_scale=_rounded(math.sqrt(text.hidden_size_per_layer_input), dtype),
        embedding_scale=_rounded(math.sqrt(text.hidden_size), dtype),
        logit_softcap=text.final_logit_softcapping,
        max_context_tokens=text.max_position_embeddings,
        tied_head=bool(hf.tie_word_embeddings),
    )


def drafter_config(hf) -> DrafterConfig:
    """hf: Gemma4AssistantConfig."""
    text = _text_config(hf, ("gemma4_assistant",), "drafter")
    _refuse(text, "drafter")
    if text.num_kv_shared_layers != text.num_hidden_layers:
        raise ValueError(
            f"drafter: num_kv_shared_layers {text.num_kv_shared_layers} != num_hidden_layers {text.num_hidden_layers}: "
            "a drafter's layers must all read the target's KV"
        )
    if missing := [kind for kind in LAYER_TYPES if kind not in text.layer_types]:
        raise ValueError(f"drafter: layer_types {text.layer_types} have no {missing[0]}: the target has donors of both")
    if hf.use_ordered_embeddings and (hf.num_centroids < 1 or text.vocab_size % hf.num_centroids):
        raise ValueError(f"drafter: num_centroids {hf.num_centroids} does not divide vocab_size {text.vocab_size}")
    if hf.use_ordered_embeddings and not 1 <= hf.centroid_intermediate_top_k <= hf.num_centroids:
        raise ValueError(
            f"drafter: centroid_intermediate_top_k {hf.centroid_intermediate_top_k} of {hf.num_centroids} centroids"
        )
    if not hf.tie_word_embeddings:
        raise ValueError("drafter: tie_word_embeddings false is not supported")
    layers = tuple(
        LayerConfig(i, LAYER_TYPES[kind], text.per_layer_config[i].head_dim, text.intermediate_size, donor=-1)
        for i, kind in enumerate(text.layer_types)
    )
    return DrafterConfig(
        **_common(text, layers),
        backbone_hidden_size=hf.backbone_hidden_size,
        num_centroids=hf.num_centroids if hf.use_ordered_embeddings else None,
        centroid_top_k=hf.centroid_intermediate_top_k,
    )


def check_pair(target: TargetConfig, drafter: DrafterConfig) -> None:
    """The rules a pair must keep; ValueError names both values. Equal token maps: checkpoint.check_token_maps."""
    rules = [
        ("backbone_hidden_size", drafter.backbone_hidden_size, "hidden_size", target.hidden_size),
        ("vocab_size", drafter.vocab_size, "vocab_size", target.vocab_size),
        ("sliding_window", drafter.window, "sliding_window", target.window),
        ("num_key_value_heads", drafter.kv_heads, "num_key_value_heads", target.kv_heads),
    ]
    for layer in drafter.layers:
        donor = target.layers[target.donors[layer.type]]
        rules.append(
            (
                f"layer {layer.index} ({layer.type}) head_dim",
                layer.head_dim,
                f"donor layer {donor.index} head_dim",
                donor.head_dim,
            )
        )
    for ours, mine, theirs, wanted in rules:
        if mine != wanted:
            raise ValueError(f"wrong pair: drafter {ours} is {mine}, target {theirs} is {wanted}")
    for kind in target.donors:
        if drafter.inv_freq[kind] != target.inv_freq[kind]:
            raise ValueError(f"wrong pair: drafter rope_parameters of {kind} layers differ from the target's")


def _text_config(hf, model_types: tuple[str, ...], who: str):
    if hf.model_type not in model_types:
        raise ValueError(f"{who}: model_type {hf.model_type!r} is not supported, expected {' or '.join(model_types)}")
    return hf.get_text_config()


def _refuse(text, who: str) -> None:
    """Name the first feature that the graphs do not build."""
    unsupported = {
        "model_type": (text.model_type, ("gemma4_text",)),
        "enable_moe_block": (text.enable_moe_block, (False,)),
        "attention_k_eq_v": (text.attention_k_eq_v, (False,)),
        "attention_bias": (text.attention_bias, (False,)),
        "use_bidirectional_attention": (text.use_bidirectional_attention, (None, "vision")),
        "hidden_activation": (text.hidden_activation, ("gelu_pytorch_tanh",)),
    }
    for i, kind in enumerate(text.layer_types):
        unsupported[f"layer_types[{i}]"] = (kind, tuple(LAYER_TYPES))
    if who == "drafter":
        unsupported["hidden_size_per_layer_input"] = (text.hidden_size_per_layer_input, (0, None))
    for name, (value, supported) in unsupported.items():
        if value not in supported:
            raise ValueError(f"{who}: {name} {value!r} is not supported (supported: {', '.join(map(str, supported))})")
    heads = sorted({text.per_layer_config[i].num_key_value_heads for i in range(text.num_hidden_layers)})
    if len(heads) != 1 or heads[0] < 1 or text.num_attention_heads % heads[0]:
        raise ValueError(
            f"{who}: num_key_value_heads {', '.join(map(str, heads))} is not supported: it must be the same in all layers "
            f"and divide num_attention_heads {text.num_attention_heads}"
        )
    for name, least in (("sliding_window", MIN_WINDOW), ("max_position_embeddings", MIN_CONTEXT)):
        if getattr(text, name) < least:
            raise ValueError(f"{who}: {name} {getattr(text, name)} is not supported, it must be at least {least}")
    for kind in dict.fromkeys(text.layer_types):
        if (rope := text.rope_parameters[kind]["rope_type"]) not in ("default", "proportional"):
            raise ValueError(f"{who}: rope_type {rope!r} of {kind} is not supported (supported: default, proportional)")


def _common(text, layers: tuple[LayerConfig, ...]) -> dict:
    return {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "query_heads": text.num_attention_heads,
        "kv_heads": text.per_layer_config[0].num_key_value_heads,
        "window": text.sliding_window,
        "rms_norm_eps": text.rms_norm_eps,
        "layers": layers,
        "inv_freq": {LAYER_TYPES[kind]: _inv_freq(text, kind) for kind in dict.fromkeys(text.layer_types)},
    }


def _inv_freq(text, kind: str) -> tuple[float, ...]:
    """As Transformers computes them: the rotary module of this very config."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    rotary = Gemma4TextRotaryEmbedding(text)
    if getattr(rotary, f"{kind}_attention_scaling") != 1.0:
        raise ValueError(f"rope of {kind}: attention scaling other than 1 is not supported")
    return tuple(getattr(rotary, f"{kind}_inv_freq").tolist())


def _rounded(value: float, dtype) -> float:
    import torch

    return torch.tensor(value, dtype=dtype).item()
