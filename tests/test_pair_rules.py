"""A pair that does not belong together is refused before anything is written, by one line that names both values."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from export.__main__ import main
from export.checkpoint import check_token_maps
from export.config import DrafterConfig, TargetConfig, check_pair
from export.weights import open_drafter, open_target

from .edits import REMOVED, edit_json, edit_tensors, error_line
from .pairs import PairShape, copy_pair, write_tokenizer

SHAPE = PairShape()
S, F = "sliding_attention", "full_attention"


@pytest.fixture
def pair(pair_of, tmp_path) -> tuple[Path, Path]:
    return copy_pair(pair_of(SHAPE), tmp_path)


def refused(target: Path, drafter: Path, capsys) -> str:
    """The line that an export of this pair ends with; it must leave no folder."""
    out = drafter.parent / "bundle"
    line = error_line(main, ["tiny", "--checkpoint", target, "--drafter", drafter, "--out", out], capsys)
    assert not out.exists()
    return line


@pytest.fixture
def configs(pair_of) -> tuple[TargetConfig, DrafterConfig]:
    target, drafter = map(str, pair_of(SHAPE))
    return open_target(target).config, open_drafter(drafter).config


# Rules between the two configurations.


def with_head_dim(config: DrafterConfig, kind: str, head_dim: int) -> DrafterConfig:
    layers = tuple(replace(layer, head_dim=head_dim) if layer.type == kind else layer for layer in config.layers)
    return replace(config, layers=layers)


def with_rope(config: DrafterConfig, kind: str) -> DrafterConfig:
    return replace(config, inv_freq={**config.inv_freq, kind: config.inv_freq[kind][::-1]})


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (lambda d: replace(d, backbone_hidden_size=96), ["backbone_hidden_size is 96", "hidden_size is 64"]),
        (lambda d: replace(d, vocab_size=500), ["drafter vocab_size is 500", "target vocab_size is 512"]),
        (lambda d: replace(d, window=16), ["drafter sliding_window is 16", "target sliding_window is 8"]),
        (lambda d: replace(d, kv_heads=2), ["drafter num_key_value_heads is 2", "target num_key_value_heads is 1"]),
        (lambda d: with_head_dim(d, "sliding", 16), ["layer 0 (sliding) head_dim is 16", "donor layer 3 head_dim is 32"]),
        (lambda d: with_head_dim(d, "full", 32), ["layer 3 (full) head_dim is 32", "donor layer 4 head_dim is 64"]),
        (lambda d: with_rope(d, "full"), ["rope", "full", "drafter", "target"]),
        (lambda d: with_rope(d, "sliding"), ["rope", "sliding", "drafter", "target"]),
    ],
)  # fmt: skip
def test_rules_name_both_values(configs, edit, parts):
    target, drafter = configs
    check_pair(target, drafter)
    with pytest.raises(ValueError, match=r"^wrong pair: [^\n]*$") as caught:
        check_pair(target, edit(drafter))
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    ("mine", "parts"),
    [
        (PairShape(hidden=96, per_layer=24), ["backbone_hidden_size is 64", "hidden_size is 96"]),
        (PairShape(window=16), ["sliding_window is 8", "sliding_window is 16"]),
        (PairShape(vocab=1024), ["vocab_size is 512", "vocab_size is 1024"]),
        (PairShape(kv_heads=2), ["num_key_value_heads is 1", "num_key_value_heads is 2"]),
        (PairShape(head_dim=16), ["head_dim is 32", "donor layer 3 head_dim is 16"]),
        (PairShape(full_head_dim=32), ["head_dim is 64", "donor layer 4 head_dim is 32"]),
    ],
)
def test_a_drafter_of_another_target(pair_of, pair, mine, parts, capsys):
    line = refused(pair_of(mine)[0], pair[1], capsys)
    assert "wrong pair" in line and all(part in line for part in parts), line


# Folders in the wrong place, and what each side refuses by itself.


def test_target_and_drafter_swapped(pair, capsys):
    line = refused(*pair[::-1], capsys)
    assert "target: model_type 'gemma4_assistant'" in line and "gemma4_text or gemma4" in line


def test_the_target_is_no_drafter(pair, capsys):
    line = refused(pair[0], pair[0], capsys)
    assert "drafter: model_type 'gemma4_text'" in line and "gemma4_assistant" in line


TEXT = "text_config"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({f"{TEXT}/num_kv_shared_layers": 2}, ["All layers", "Expected 4. Got 2"]),
        ({f"{TEXT}/layer_types": [S] * 3}, ["layer_types", "3", "4"]),
        ({f"{TEXT}/layer_types": [F] * 4, f"{TEXT}/per_layer_config": {str(i): {"head_dim": 64} for i in range(4)}}, ["layer_types ['full_attention',", "no sliding_attention"]),
        ({f"{TEXT}/hidden_size_per_layer_input": 8}, ["hidden_size_per_layer_input must be 0, got 8"]),
        ({f"{TEXT}/enable_moe_block": True}, ["enable_moe_block must be False, got True"]),
        ({f"{TEXT}/use_double_wide_mlp": True}, ["use_double_wide_mlp must be False, got True"]),
        ({f"{TEXT}/attention_bias": True}, ["drafter: attention_bias True"]),
        ({f"{TEXT}/attention_k_eq_v": True}, ["drafter: attention_k_eq_v True"]),
        ({f"{TEXT}/hidden_activation": "silu"}, ["drafter: hidden_activation 'silu'"]),
        ({f"{TEXT}/rope_parameters/full_attention/rope_theta": 5e5}, ["rope_parameters of full layers differ"]),
        ({f"{TEXT}/rope_parameters/full_attention/partial_rotary_factor": 0.5}, ["rope_parameters of full layers differ"]),
        ({f"{TEXT}/rope_parameters/sliding_attention/rope_theta": 1e6}, ["rope_parameters of sliding layers differ"]),
        ({f"{TEXT}/sliding_window": 16}, ["drafter sliding_window is 16", "target sliding_window is 8"]),
        ({"backbone_hidden_size": 96}, ["post_projection.weight", "[64, 64]", "[96, 64]"]),
        ({"tie_word_embeddings": False}, ["tie_word_embeddings false"]),
        ({"num_centroids": 33}, ["num_centroids 33 does not divide vocab_size 512"]),
        ({"num_centroids": 0}, ["num_centroids 0"]),
        ({"num_centroids": 64}, ["masked_embedding.centroids.weight", "[32, 64]", "[64, 64]"]),
        ({"centroid_intermediate_top_k": 33}, ["centroid_intermediate_top_k 33 of 32"]),
        ({"centroid_intermediate_top_k": 0}, ["centroid_intermediate_top_k 0 of 32"]),
        ({"use_ordered_embeddings": False}, ["unknown tensor masked_embedding.centroids.weight"]),
        ({TEXT: REMOVED}, ["error: "]),
    ],
)  # fmt: skip
def test_bad_drafter_configs(pair, changes, parts, capsys):
    edit_json(pair[1] / "config.json", changes)
    line = refused(*pair, capsys)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize("name", ["masked_embedding.centroids.weight", "masked_embedding.token_ordering"])
def test_centroid_tensors_missing(pair, name, capsys):
    edit_tensors(pair[1], lambda tensors: tensors.pop(name))
    assert f"tensor {name} is missing" in refused(*pair, capsys)


def test_token_ordering_of_the_wrong_size(pair, capsys):
    edit_tensors(pair[1], lambda tensors: tensors.update({"masked_embedding.token_ordering": torch.arange(500)}))
    line = refused(*pair, capsys)
    assert "masked_embedding.token_ordering" in line and "[500]" in line and "[512]" in line


# Token maps.


def test_unequal_token_maps(pair, capsys):
    path = pair[1] / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace("\\u2581piece7", "other"), encoding="utf-8")
    line = refused(*pair, capsys)
    assert "wrong pair: token " in line and "None" in line


def test_token_maps_with_two_ids_exchanged(pair, capsys):
    path = pair[1] / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    vocab = data["model"]["vocab"]
    vocab["<0x41>"], vocab["<0x42>"] = vocab["<0x42>"], vocab["<0x41>"]
    path.write_text(json.dumps(data), encoding="utf-8")
    line = refused(*pair, capsys)
    assert f"token '<0x41>' is {vocab['<0x41>']} in the drafter's tokenizer, {vocab['<0x42>']} in the target's" in line


def test_a_drafter_without_a_tokenizer_is_not_compared(pair):
    (pair[1] / "tokenizer.json").unlink()
    assert not check_token_maps(*pair, SHAPE.vocab)


@pytest.mark.parametrize("side", [0, 1])
def test_a_tokenizer_that_is_none(pair, side, capsys):
    (pair[side] / "tokenizer.json").write_text("{}")
    assert f"{pair[side] / 'tokenizer.json'}: not a tokenizer" in refused(*pair, capsys)


def test_a_target_without_a_tokenizer(pair, capsys):
    (pair[0] / "tokenizer.json").unlink()
    assert f"{pair[0]}: no tokenizer.json" in refused(*pair, capsys)


def test_a_tokenizer_larger_than_the_vocabulary(pair, capsys):
    for folder in pair:
        write_tokenizer(folder, SHAPE.vocab + 1)
    line = refused(*pair, capsys)
    assert "token id 512" in line and "vocab_size is 512" in line
