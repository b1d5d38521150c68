"""The two models of the tiny pair: their configurations, and their way into published checkpoint folders.

Target and drafter have every feature of Gemma 4 E2B and its drafter at toy sizes; all sizes are written here.
Shapes as in `tools.train_tiny`.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
    PreTrainedModel,
)

from tools import tiny_corpus as corpus

WINDOW = 32
GLOBAL_HEAD_DIM = 64
SOFTCAP = 30.0
CENTROIDS = 32
CENTROIDS_READ = 8
LAYER_SCALARS = (0.875, 1.0, 1.125, 0.8125)  # exact in bf16; not all 1, so that leaving them out shows
STOP_IDS = [corpus.EOS, corpus.END_OF_TURN, corpus.TOOL_RESPONSE]
TOKEN_IDS = {"bos_token_id": corpus.BOS, "eos_token_id": STOP_IDS, "pad_token_id": corpus.PAD}
GENERATION = {
    "target": {**TOKEN_IDS, "do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95},
    "assistant": {**TOKEN_IDS, "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"},
}


def text_config(layers: int, **sizes: float | bool | None) -> Gemma4TextConfig:
    """What target and drafter have in common: heads, window, every fourth layer full, rope, token ids."""
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    kinds = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)]
    return Gemma4TextConfig(
        vocab_size=corpus.VOCAB_SIZE,
        num_hidden_layers=layers,
        layer_types=kinds,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=GLOBAL_HEAD_DIM,
        intermediate_size=192,
        sliding_window=WINDOW,
        max_position_embeddings=corpus.MODEL_MAX_LENGTH,
        rope_parameters={"sliding_attention": sliding, "full_attention": full},
        pad_token_id=corpus.PAD,
        eos_token_id=corpus.EOS,
        bos_token_id=corpus.BOS,
        tie_word_embeddings=True,
        **sizes,
    )


def make_target() -> Gemma4ForCausalLM:
    """8 layers, every 4th full; the last 4 read the KV of layers 2 (sliding) and 3 (full)."""
    config = text_config(
        layers=8,
        hidden_size=128,
        num_kv_shared_layers=4,
        use_double_wide_mlp=True,
        vocab_size_per_layer_input=corpus.VOCAB_SIZE,
        hidden_size_per_layer_input=32,
        final_logit_softcapping=SOFTCAP,
    )
    target = Gemma4ForCausalLM(config)
    set_layer_scalars(target)
    return target


def make_drafter(target: Gemma4ForCausalLM) -> Gemma4AssistantForCausalLM:
    """4 layers [sliding x3, full] without K/V of their own; the head reads the tokens of the best 8 centroids of 32."""
    text = text_config(
        layers=4,
        hidden_size=64,
        num_kv_shared_layers=4,
        use_double_wide_mlp=False,
        vocab_size_per_layer_input=0,
        hidden_size_per_layer_input=0,
    )
    config = Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=target.config.hidden_size,
        use_ordered_embeddings=True,
        num_centroids=CENTROIDS,
        centroid_intermediate_top_k=CENTROIDS_READ,
        tie_word_embeddings=True,
    )
    drafter = Gemma4AssistantForCausalLM(config)
    set_layer_scalars(drafter)
    return drafter


def set_layer_scalars(model: PreTrainedModel) -> None:
    """They are buffers: training leaves them as they are."""
    for index, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(LAYER_SCALARS[index % len(LAYER_SCALARS)])


def additive(visible: Tensor) -> Tensor:
    """bool [queries, keys] -> float [1, 1, queries, keys]: eager attention ADDS its mask, a bool one masks nothing."""
    return torch.zeros(visible.shape).masked_fill(~visible, -1e9)[None, None]


def causal_masks(tokens: int) -> dict[str, Tensor]:
    """The target's masks [1, 1, T, T] by layer type."""
    age = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return {"full_attention": additive(age >= 0), "sliding_attention": additive((age >= 0) & (age < WINDOW))}


def draft_masks(pending: Tensor, tokens: int) -> dict[str, Tensor]:
    """Masks [1, 1, Q, T]: a block whose pending token stands at t (pending [Q]) sees committed keys only, j < t.

    Sliding layers see the last W committed keys: the pending token has no key yet.
    """
    age = pending[:, None] - torch.arange(tokens)
    return {"full_attention": additive(age >= 1), "sliding_attention": additive((age >= 1) & (age <= WINDOW))}


def target_logits(target: Gemma4ForCausalLM, hidden: Tensor) -> Tensor:
    """Softcapped float32 logits [B, T, V] of post-norm rows [B, T, H]."""
    return SOFTCAP * torch.tanh(F.linear(hidden.float(), target.lm_head.weight) / SOFTCAP)


def round_weights(model: nn.Module) -> None:
    """Round to what the bf16 checkpoint will hold, so that what follows works with the weights that are published."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bf16); `folder.name` is its role in the pair."""
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(**GENERATION[folder.name])
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    publish_config(folder / "config.json")


def publish_config(path: Path) -> None:
    """Rewrite a saved config in the published form: `global_head_dim` where save_pretrained puts `per_layer_config`."""
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    del text["per_layer_config"]
    text |= {"global_head_dim": GLOBAL_HEAD_DIM, "num_global_key_value_heads": None}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
