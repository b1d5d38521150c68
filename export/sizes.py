"""The official sizes: Transformers configs of google/gemma-4-E2B-it and -E4B-it with their assistants.

Figures of their config.json files, checked field by field against a checkpoint that is said to have one of the sizes.
"""

from dataclasses import dataclass

from transformers import Gemma4AssistantConfig, Gemma4TextConfig, PreTrainedConfig

S, F = "sliding_attention", "full_attention"
VOCAB, CONTEXT, WINDOW = 262_144, 131_072, 512  # tokens
HEAD_DIM, FULL_HEAD_DIM = 256, 512
ROPE = ("rope_type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class Size:
    """period: every period-th layer is full. Other sizes than the official ones, cut down, serve the tests."""

    hidden: int
    layers: int
    shared: int
    period: int
    kv_heads: int
    intermediate: int
    double_wide: bool


SIZES = {
    "e2b": Size(hidden=1536, layers=35, shared=20, period=5, kv_heads=1, intermediate=6144, double_wide=True),
    "e4b": Size(hidden=2560, layers=42, shared=18, period=6, kv_heads=2, intermediate=10240, double_wide=False),
}


def target_of(size: Size) -> Gemma4TextConfig:
    return Gemma4TextConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_kv_shared_layers=size.shared,
        layer_types=[F if (i + 1) % size.period == 0 else S for i in range(size.layers)],
        num_attention_heads=8,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.intermediate,
        use_double_wide_mlp=size.double_wide,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=VOCAB,
        final_logit_softcapping=30.0,
        dtype="bfloat16",
        **_common(),
    )


def drafter_of(size: Size) -> Gemma4AssistantConfig:
    text = Gemma4TextConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_kv_shared_layers=4,
        layer_types=[S, S, S, F],
        num_attention_heads=4,
        num_key_value_heads=size.kv_heads,
        intermediate_size=2048,
        use_double_wide_mlp=False,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        final_logit_softcapping=None,
        **_common(),
    )
    return Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=size.hidden,
        use_ordered_embeddings=True,
        num_centroids=2048,
        centroid_intermediate_top_k=32,
        dtype="bfloat16",
    )


def _common() -> dict:
    rope = {
        S: {"rope_type": "default", "rope_theta": 1e4},
        F: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
    return {
        "vocab_size": VOCAB,
        "head_dim": HEAD_DIM,
        "global_head_dim": FULL_HEAD_DIM,
        "sliding_window": WINDOW,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
    }


def check_size(name: str, target: PreTrainedConfig, drafter: PreTrainedConfig) -> None:
    """ValueError with the first field of a pair's configs that is not the size's, its value and what to ask for."""
    fields = target_fields(target)
    others = [other for other, size in SIZES.items() if fields == target_fields(target_of(size))]
    _check(fields, target_fields(target_of(SIZES[name])), name, f"use {others[0] if others else 'custom'}")
    wanted = drafter_fields(drafter_of(SIZES[name]))
    _check(drafter_fields(drafter), wanted, f"{name}'s drafter", f"give a drafter of {name} with --drafter")


def _check(fields: dict, wanted: dict, what: str, remedy: str) -> None:
    for field, value in wanted.items():
        if fields.get(field) != value:
            raise ValueError(f"{field} is {fields.get(field)}, {what} has {value}: {remedy}")


def target_fields(config: PreTrainedConfig) -> dict[str, object]:
    """Every figure of a target's size, by the checkpoint's names. config: Gemma4TextConfig or Gemma4Config."""
    return _text_fields(config.get_text_config())


def drafter_fields(config: PreTrainedConfig) -> dict[str, object]:
    """Every figure of a drafter's size. config: Gemma4AssistantConfig."""
    own = ("backbone_hidden_size", "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k")
    return {name: getattr(config, name) for name in own} | _text_fields(config.get_text_config())


def _text_fields(text: Gemma4TextConfig) -> dict[str, object]:
    """The length of a context is none: it changes no weight."""
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "use_double_wide_mlp", "num_attention_heads")
    names += ("num_kv_shared_layers", "hidden_size_per_layer_input", "vocab_size", "sliding_window")
    fields = {name: getattr(text, name) for name in names}
    for i, kind in enumerate(text.layer_types):
        layer = text.per_layer_config[i]
        fields |= {
            f"layer_types[{i}]": kind,
            f"num_key_value_heads of layer {i}": layer.num_key_value_heads,
            f"head_dim of layer {i}": layer.head_dim,
        }
    for kind, name in ((S, "rope_type"), (S, "rope_theta"), *((F, name) for name in ROPE)):
        fields[f"{name} of {kind}"] = text.rope_parameters.get(kind, {}).get(name)
    return fields | {
        "rms_norm_eps": text.rms_norm_eps,
        "final_logit_softcapping": text.final_logit_softcapping,
    }
