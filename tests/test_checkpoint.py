"""Reading of checkpoints: every layout that occurs gives the same weights, every defect is refused by one line that
names the tensor or key and its value. Nothing is lowered here."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma4Config, Gemma4TextConfig

from export.graphs import CrossDecoder, Drafter, SelfDecoder
from export.quant import RECIPES
from export.weights import Weights, fill, open_drafter, open_target

from .edits import REMOVED, edit_json, edit_tensors
from .pairs import PairShape, copy_pair

SHAPE = PairShape()
EMBEDDINGS = "model.embed_tokens.weight"
FIRST_SHARED = SHAPE.layers - SHAPE.shared


@pytest.fixture
def pair(pair_of, tmp_path) -> tuple[Path, Path]:
    return copy_pair(pair_of(SHAPE), tmp_path)


@pytest.fixture
def target(pair) -> Path:
    return pair[0]


@pytest.fixture
def drafter(pair) -> Path:
    return pair[1]


def values(weights: Weights) -> dict[str, Tensor]:
    return {name: weights.checkpoint.read(name) for name in weights.checkpoint.tensors}


def assert_same_weights(mine: Weights, reference: Weights) -> None:
    assert mine.config == reference.config
    ours, theirs = values(mine), values(reference)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def refused(open_source, folder: Path) -> str:
    """The message, which must be one line."""
    with pytest.raises(ValueError) as caught:
        open_source(str(folder))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


# Layouts: each edit leaves the weights what they are.


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names, weight_map = sorted(tensors), {}
    for i in range(3):
        part = {name: tensors[name] for name in names[i::3]}
        save_file(part, folder / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def make_multimodal(folder: Path) -> None:
    """Gemma4Config with a text_config, the multimodal key prefix and tensors of the other modalities."""
    text = Gemma4TextConfig.from_pretrained(folder)
    Gemma4Config(text_config=text, dtype="bfloat16").save_pretrained(folder)

    def rename(tensors):
        for key in list(tensors):
            tensors[key.replace("model.", "model.language_model.", 1)] = tensors.pop(key)
        for tower in ("vision_tower", "audio_tower", "embed_vision", "embed_audio"):
            tensors[f"model.{tower}.layers.0.weight"] = torch.ones(2, 2)
        tensors["model.vision_tower.patch.position"] = torch.ones(2, dtype=torch.int64)

    edit_tensors(folder, rename)


def add_shared_kv(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({key: torch.ones(3) for key in shared_kv_keys()}))


def shared_kv_keys() -> list[str]:
    parts = ("k_proj", "v_proj", "k_norm")
    layers = range(FIRST_SHARED, SHAPE.layers)
    return [f"model.layers.{i}.self_attn.{part}.weight" for i in layers for part in parts]


def repeat_head(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t[EMBEDDINGS].clone()}))


def drop_default_keys(folder: Path) -> None:
    """As saved files have it: a key that equals the class default may be absent."""
    config, defaults = json.loads((folder / "config.json").read_text()), Gemma4TextConfig().to_dict()
    kept = {key: value for key, value in config.items() if key not in defaults or defaults[key] != value}
    assert len(kept) < len(config) - 10
    (folder / "config.json").write_text(json.dumps({**kept, "model_type": "gemma4_text"}))


@pytest.mark.parametrize(
    ("edit", "dropped"),
    [
        (shard, {}),
        (make_multimodal, {"vision and audio": 5}),
        (add_shared_kv, {"keys and values of KV-shared layers": len(shared_kv_keys())}),
        (repeat_head, {"tied head": 1}),
        (drop_default_keys, {}),
    ],
)
def test_layouts_give_the_same_weights(pair_of, target, edit, dropped):
    reference = open_target(str(pair_of(SHAPE)[0]))
    assert not reference.checkpoint.dropped
    edit(target)
    weights = open_target(str(target))
    assert_same_weights(weights, reference)
    assert {reason: len(keys) for reason, keys in weights.checkpoint.dropped.items()} == dropped


def test_all_layouts_at_once(pair_of, target):
    for edit in (add_shared_kv, repeat_head, make_multimodal, shard):
        edit(target)
    weights = open_target(str(target))
    assert_same_weights(weights, open_target(str(pair_of(SHAPE)[0])))
    assert sum(map(len, weights.checkpoint.dropped.values())) == len(shared_kv_keys()) + 6


@pytest.mark.parametrize("multimodal", [False, True])
def test_untied_head_is_a_tensor_of_its_own(target, multimodal):
    head = torch.randn(SHAPE.vocab, SHAPE.hidden).bfloat16()
    edit_tensors(target, lambda t: t.update({"lm_head.weight": head}))
    if multimodal:
        make_multimodal(target)
    edit_json(target / "config.json", {"tie_word_embeddings": False})
    weights = open_target(str(target))
    assert not weights.config.tied_head
    assert torch.equal(
        fill(CrossDecoder(weights.config, RECIPES["onnx"]["fp32"]), weights).lm_head.weight, head.float()
    )
    assert not torch.equal(weights.checkpoint.read("embed_tokens.weight"), head)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float_dtypes(target, dtype):
    stored = load_file(target / "model.safetensors")
    edit_tensors(target, lambda t: t.update({name: value.to(dtype) for name, value in t.items()}))
    edit_json(target / "config.json", {"dtype": str(dtype).removeprefix("torch.")})
    weights = open_target(str(target))
    assert weights.checkpoint.dtype == dtype
    graph = fill(SelfDecoder(weights.config, RECIPES["onnx"]["fp32"]), weights)
    for name, buffer in graph.named_buffers():
        if "per_layer_model_projection" not in name and "per_layer_projection_norm" not in name:
            assert torch.equal(buffer, stored[f"model.{name}"].to(dtype).float()), name


def test_dtype_of_the_embeddings_where_the_config_names_none(target):
    edit_json(target / "config.json", {"dtype": REMOVED})
    assert open_target(str(target)).checkpoint.dtype == torch.bfloat16


def test_model_projection_is_split_by_output_rows(target):
    weights = open_target(str(target))
    whole = weights.checkpoint.read("per_layer_model_projection.weight").float()
    layers = {
        **fill(SelfDecoder(weights.config, RECIPES["onnx"]["fp32"]), weights).layers,
        **fill(CrossDecoder(weights.config, RECIPES["onnx"]["fp32"]), weights).layers,
    }
    parts = [layers[str(i)].per_layer_model_projection.weight for i in range(SHAPE.layers)]
    assert torch.equal(torch.cat(parts), whole)


# Defects of the tensors.


def poison(value: float):
    return lambda t: t["model.layers.2.mlp.up_proj.weight"].view(-1)[7:8].fill_(value)


def double(t: dict) -> None:
    t["model.language_model.norm.weight"] = t["model.norm.weight"]


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (lambda t: t.update({"model.extra.weight": torch.ones(2)}), ["unknown tensor model.extra.weight [2]"]),
        (lambda t: t.update({"model.layers.3.mlp.bias": torch.ones(1)}), ["unknown tensor model.layers.3.mlp.bias"]),
        (lambda t: t.update({"model.layers.10.norm": torch.ones(1)}), ["unknown tensor model.layers.10.norm"]),
        (lambda t: t.pop("model.layers.7.self_attn.q_norm.weight"), ["layers.7.self_attn.q_norm.weight is missing"]),
        (lambda t: t.pop("model.layers.0.layer_scalar"), ["tensor layers.0.layer_scalar is missing"]),
        (lambda t: t.update({"model.norm.weight": torch.ones(65)}), ["model.norm.weight", "[65]", "[64]"]),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].double()}), ["model.norm.weight is F64", "BF16, F16, F32"]),
        (lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}), ["model.norm.weight is F8_E4M3"]),
        (double, ["model.language_model.norm.weight", "model.norm.weight", "are both norm.weight"]),
        (lambda t: t.update({"lm_head.weight": t[EMBEDDINGS] * 2}), ["tie_word_embeddings", "lm_head.weight differs"]),
        (lambda t: t.update({"lm_head.weight": torch.ones(3)}), ["tie_word_embeddings", "lm_head.weight"]),
    ],
)  # fmt: skip
def test_bad_tensors_are_named(target, edit, parts):
    edit_tensors(target, edit)
    message = refused(open_target, target)
    assert all(part in message for part in [*parts, str(target)]), message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_named(target, value):
    edit_tensors(target, poison(value))
    weights = open_target(str(target))
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.up_proj\.weight holds a value that is not finite"):
        fill(SelfDecoder(weights.config, RECIPES["onnx"]["int8"]), weights)


def test_untied_head_missing(target):
    edit_json(target / "config.json", {"tie_word_embeddings": False})
    assert "tensor lm_head.weight is missing" in refused(open_target, target)


def set_ordering(value: int):
    return lambda t: t["masked_embedding.token_ordering"].view(-1)[3:4].fill_(value)


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (set_ordering(SHAPE.vocab), ["token_ordering is no permutation of 0..511"]),
        (set_ordering(-1), ["token_ordering is no permutation"]),
        (lambda t: t["masked_embedding.token_ordering"].view(-1)[:2].fill_(0), ["token_ordering is no permutation"]),
        (lambda t: t.pop("masked_embedding.token_ordering"), ["masked_embedding.token_ordering is missing"]),
        (lambda t: t.pop("masked_embedding.centroids.weight"), ["masked_embedding.centroids.weight is missing"]),
        (lambda t: t.update({"masked_embedding.centroids.weight": torch.ones(32, 63)}), ["centroids", "[32, 63]", "[32, 64]"]),
        (lambda t: t.update({"masked_embedding.token_ordering": torch.ones(512)}), ["token_ordering is F32", "I64, I32"]),
        (lambda t: t.pop("pre_projection.weight"), ["pre_projection.weight is missing"]),
    ],
)  # fmt: skip
def test_bad_drafter_tensors_are_named(drafter, edit, parts):
    edit_tensors(drafter, edit)
    message = refused(open_drafter, drafter)
    assert all(part in message for part in [*parts, str(drafter)]), message


def test_drafter_fills_and_keeps_the_order_of_tokens(drafter):
    weights = open_drafter(str(drafter))
    graph = fill(Drafter(weights.config, RECIPES["onnx"]["fp32"]), weights)
    assert torch.equal(graph.pre_projection.weight, weights.checkpoint.read("pre_projection.weight").float())


# Defects of the files.


def truncate(path: Path, size_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:size_bytes])


def break_index(change):
    def edit(folder: Path) -> None:
        shard(folder)
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        path.write_text(json.dumps(change(index)))

    return edit


def list_a_tensor_too_many(index: dict) -> dict:
    index["weight_map"]["model.ghost.weight"] = "model-1.safetensors"
    return index


def name_files(value: object):
    return break_index(lambda index: {"weight_map": dict.fromkeys(index["weight_map"], value)})


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (lambda f: truncate(f / "model.safetensors", 100_000), ["model.safetensors: truncated", "download it again"]),
        (lambda f: truncate(f / "model.safetensors", 5), ["model.safetensors: truncated"]),
        (lambda f: truncate(f / "model.safetensors", 0), ["model.safetensors: truncated"]),
        (lambda f: (f / "model.safetensors").write_bytes(b"version https://git-lfs"), ["truncated or not a safetensors"]),
        (lambda f: (f / "model.safetensors").unlink(), ["no model.safetensors"]),
        (lambda f: (shard(f), (f / "model-1.safetensors").unlink()), ["model-1.safetensors: shard is missing"]),
        (lambda f: (shard(f), truncate(f / "model-2.safetensors", 9_000)), ["model-2.safetensors: truncated"]),
        (lambda f: (shard(f), shutil.copy(f / "model-2.safetensors", f / "model-0.safetensors")), ["is also in model-0.safetensors"]),
        (break_index(list_a_tensor_too_many), ["model.ghost.weight is not in model-1.safetensors", "1 missing"]),
        (break_index(lambda index: {}), ["index.json: not a safetensors index"]),
        (break_index(lambda index: []), ["index.json: not a safetensors index"]),
        (break_index(lambda index: {"weight_map": []}), ["index.json: not a safetensors index"]),
        (name_files(7), ["index.json: not a safetensors index"]),
        (name_files("../other.safetensors"), ["index.json", "../other.safetensors"]),
        (lambda f: (f / "config.json").unlink(), ["no config.json", "Transformers layout"]),
        (lambda f: (f / "config.json").write_text("{"), ["config.json"]),
        (lambda f: (f / "config.json").write_text("[]"), ["config.json"]),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), ["config.json"]),
        (lambda f: edit_json(f / "config.json", {"model_type": "gemma99"}), ["config.json", "gemma99"]),
        (lambda f: edit_json(f / "config.json", {"model_type": REMOVED}), ["config.json", "model_type"]),
        (lambda f: edit_json(f / "config.json", {"hidden_size": "64"}), ["config.json", "hidden_size", "'64'"]),
    ],
)  # fmt: skip
def test_bad_files_are_named(target, edit, parts):
    edit(target)
    message = refused(open_target, target)
    assert all(part in message for part in [*parts, str(target)]), message


def test_a_file_that_is_cut_while_it_is_read(target):
    weights = open_target(str(target))
    truncate(target / "model.safetensors", 100_000)
    with pytest.raises(ValueError, match=r"model\.safetensors: changed while it was read .*; export again"):
        fill(SelfDecoder(weights.config, RECIPES["onnx"]["int8"]), weights)


@pytest.mark.parametrize("source", ["no/such/folder", "nonsense", "", "a//b", __file__])
def test_a_source_that_is_no_folder_and_no_id(source):
    assert f"checkpoint {source!r}" in refused(open_target, source)


def test_a_single_file_counts_where_an_index_is_left_over(pair_of, tmp_path):
    """As in Transformers: saving whole after saving in shards leaves the index."""
    target, _ = copy_pair(pair_of(PairShape()), tmp_path)
    (target / "model.safetensors.index.json").write_text('{"weight_map": {"gone": "model-00001-of-00002.safetensors"}}')
    assert open_target(str(target)).checkpoint.tensors["norm.weight"].file.name == "model.safetensors"
