"""True widths: checkpoints in the official layout (multimodal keys, shards, 262,144 tokens), of fewer layers, against
Transformers. Their weights are random and about 2 GB each: bfloat16 in memory, layers float32."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Gemma4Config, Gemma4ForCausalLM
from transformers.initialization import no_init_weights

from export.package import export_package
from export.random_weights import random_pair
from export.sizes import SIZES, Size, drafter_of, target_of
from export.weights import Weights
from runtime_py.loading import load

from .texts import GEMMA, needs_gemma
from .tolerances import OFFICIAL_INT8

PROMPT = "Why is the sky blue at noon, 日本語 and café?"
SHARD_BYTES = 800_000_000
OTHER_MODALITIES = ("vision_tower.encoder", "audio_tower.conformer", "embed_vision.proj", "embed_audio.proj")


def cut(name: str) -> Size:
    """The fewest layers that hold every kind: two own keys and values, two share them."""
    return replace(SIZES[name], layers=4, shared=2, period=2)


def write_checkpoint(folder: Path, weights: Weights, prefix: str, more: dict[str, Tensor]) -> None:
    """Shards with an index. weights: their folder holds what is no weight."""
    checkpoint, weight_map, shard = weights.checkpoint, {}, dict(more)
    shutil.copytree(checkpoint.folder, folder, dirs_exist_ok=True)
    names = list(checkpoint.tensors)
    for name in names:
        own = name.startswith(("pre_projection", "post_projection", "masked_embedding"))
        shard[name if own else prefix + name] = checkpoint.read(name)
        if name == names[-1] or sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
            save_file(shard, folder / file, {"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def reference_logits(weights: Weights, ids: list[int]) -> np.ndarray:
    """Transformers' last row, float32 but for the tables."""
    with no_init_weights():
        model = Gemma4ForCausalLM(weights.checkpoint.config).eval()
    state = {f"model.{name}": weights.checkpoint.read(name) for name in weights.checkpoint.tensors}
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    del state
    for name, module in model.model.named_children():
        if name.startswith("embed_tokens"):
            module.register_forward_hook(lambda module, inputs, output: output.float())
        else:
            module.float()
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        logits = torch.cat([rows.float() @ hidden for rows in model.model.embed_tokens.weight.split(1 << 14)])
    softcap = weights.config.logit_softcap
    return (softcap * torch.tanh(logits / softcap)).numpy()


def last_row(bundle: Path) -> tuple[np.ndarray, list[int]]:
    """The bundle's logits of a prompt's last token, and the prompt's ids."""
    pair = load(bundle, threads=2)
    assert pair.off_reason is None
    ids = pair.text.encode_prompt(PROMPT)
    return pair.target.forward(pair.target.new_cache(256), ids, last_row_only=True).logits[0], ids


@needs_gemma
@pytest.mark.parametrize(("name", "kv_heads"), [("e2b", 1), ("e4b", 2)])
def test_a_row_of_logits_at_true_width(tmp_path, name, kv_heads):
    size = cut(name)
    with random_pair(target_of(size), drafter_of(size), GEMMA) as (target, drafter):
        others = {f"model.{tower}.weight": torch.ones(2, 2, dtype=torch.bfloat16) for tower in OTHER_MODALITIES}
        write_checkpoint(tmp_path / "target", target, "model.language_model.", others)
        Gemma4Config(text_config=target.checkpoint.config, dtype="bfloat16").save_pretrained(tmp_path / "target")
        write_checkpoint(tmp_path / "assistant", drafter, "model.", {})
        out, folders = tmp_path / "bundle", (tmp_path / "target", tmp_path / "assistant")
        package = export_package("custom", *map(str, folders), "int8", out)
        for folder in folders:
            shutil.rmtree(folder)
        row, ids = last_row(out)
        shutil.rmtree(out)
        expected = reference_logits(target, ids)
    assert max(ids) > 1 << 16 and row.shape == (262_144,)
    assert package.manifest.kv.layers[0].kv_heads == kv_heads and package.manifest.warning is None
    assert any("4 tensors not used: vision and audio" in remark for remark in package.remarks)
    deviation = np.sqrt(np.mean((row - expected) ** 2)) / expected.std()
    assert deviation < OFFICIAL_INT8
