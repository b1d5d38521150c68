"""Random Gemma 4 pairs in the checkpoint layout: every shape that the exporter must take, small enough to build in seconds."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
    PreTrainedModel,
)

S, F = "sliding_attention", "full_attention"
TINY = Path(__file__).parent.parent / "models/tiny"


@dataclass(frozen=True)
class PairShape:
    """A pair of random weights. centroids None: dense drafter head. period: every period-th layer is full."""

    kv_heads: int = 1
    query_heads: int = 4
    window: int = 8
    vocab: int = 512
    hidden: int = 64
    intermediate: int = 96
    per_layer: int = 32
    head_dim: int = 32
    full_head_dim: int = 64
    layers: int = 10
    period: int = 5
    shared: int = 5
    centroids: int | None = 32
    top_k: int = 4
    drafter_hidden: int = 64
    context: int = 512
    double_wide: bool = True
    softcap: float | None = 30.0
    seed: int = 0

    @property
    def layer_types(self) -> list[str]:
        return [F if (i + 1) % self.period == 0 else S for i in range(self.layers)]


def random_target(shape: PairShape) -> Gemma4ForCausalLM:
    torch.manual_seed(shape.seed)
    config = Gemma4TextConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        global_head_dim=shape.full_head_dim,
        sliding_window=shape.window,
        layer_types=shape.layer_types,
        num_kv_shared_layers=shape.shared,
        hidden_size_per_layer_input=shape.per_layer,
        vocab_size_per_layer_input=shape.vocab,
        use_double_wide_mlp=shape.double_wide,
        final_logit_softcapping=shape.softcap,
        max_position_embeddings=shape.context,
    )
    return _shake(Gemma4ForCausalLM(config).eval())


def random_drafter(shape: PairShape) -> Gemma4AssistantForCausalLM:
    torch.manual_seed(shape.seed + 1)
    text = Gemma4TextConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.drafter_hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=4,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        global_head_dim=shape.full_head_dim,
        sliding_window=shape.window,
        layer_types=[S, S, S, F],
        num_kv_shared_layers=4,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        max_position_embeddings=shape.context,
    )
    config = Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=shape.hidden,
        use_ordered_embeddings=shape.centroids is not None,
        num_centroids=shape.centroids or 2048,  # configs of dense drafters carry the default too
        centroid_intermediate_top_k=shape.top_k,
    )
    model = _shake(Gemma4AssistantForCausalLM(config).eval())
    if shape.centroids:
        model.masked_embedding.token_ordering.copy_(torch.randperm(shape.vocab))
    return model


def _shake(model: PreTrainedModel) -> PreTrainedModel:
    """Default initialisation is nearly the identity: make every weight matter, with attention scores of order 1."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if not value.is_floating_point() or "inv_freq" in name or "embed_scale" in name:
            continue
        if name.endswith("q_norm.weight"):
            value.data = (0.5 + torch.rand_like(value)) * value.shape[0] ** -0.5
        elif "norm" in name:
            value.data = 0.5 + torch.rand_like(value)
        elif name.endswith("layer_scalar"):
            value.data = 0.5 + 0.5 * torch.rand_like(value)
        elif value.dim() == 2:
            value.data = torch.randn_like(value) * (0.3 if "embed" in name else value.shape[1] ** -0.5)
    model.tie_weights()
    return model


def write_pair(folder: Path, shape: PairShape, dtype: torch.dtype = torch.bfloat16) -> tuple[Path, Path]:
    """folder/target and folder/assistant with the tiny pair's tokenizer where its vocabulary fits, else a made-up one."""
    torch.manual_seed(shape.seed)
    target, drafter = random_target(shape).to(dtype), random_drafter(shape).to(dtype)
    ids = {"bos_token_id": 2, "eos_token_id": [1, 106] if shape.vocab > 106 else [1], "pad_token_id": 0}
    target.generation_config = GenerationConfig(**ids, do_sample=True, temperature=1.0, top_k=64, top_p=0.95)
    drafter.generation_config = GenerationConfig(
        **ids, num_assistant_tokens=3, num_assistant_tokens_schedule="constant"
    )
    for name, model in (("target", target), ("assistant", drafter)):
        model.save_pretrained(folder / name)
        write_tokenizer(folder / name, shape.vocab)
    return folder / "target", folder / "assistant"


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-fallback tokenizer of `vocab` tokens: specials, 256 bytes, then made-up pieces."""
    names = ["<pad>", "<eos>", "<bos>", "<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    names += [f"\u2581piece{i}" for i in range(vocab - len(names))]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": names[i],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i in range(4)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": [],
            "unk_token": "<unk>",
            "byte_fallback": True,
            "fuse_unk": True,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    Tokenizer.from_file(str(folder / "tokenizer.json"))


def copy_pair(pair: tuple[Path, Path], folder: Path) -> tuple[Path, Path]:
    """A copy to break."""
    return tuple(Path(shutil.copytree(path, folder / path.name)) for path in pair)
