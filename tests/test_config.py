"""What a configuration may say, and what is taken from it: embedding scales, token ids, drafting defaults, the template."""

import re
from pathlib import Path

import pytest
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from export.checkpoint import chat_template, generation_config
from export.config import target_config
from export.package import drafting_defaults, tokens_spec
from export.weights import open_drafter, open_target

from .edits import REMOVED, edit_json
from .pairs import PairShape, copy_pair, random_target
from .test_checkpoint import make_multimodal, refused

SHAPE = PairShape()


@pytest.fixture
def pair(pair_of, tmp_path) -> tuple[Path, Path]:
    return copy_pair(pair_of(SHAPE), tmp_path)


@pytest.fixture
def target(pair) -> Path:
    return pair[0]


@pytest.fixture
def drafter(pair) -> Path:
    return pair[1]


# The strict configuration.

ROPE = "rope_parameters/full_attention"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "llama"}, ["target: model_type 'llama'", "gemma4_text or gemma4"]),
        ({"enable_moe_block": True}, ["enable_moe_block", "True"]),
        ({"attention_k_eq_v": True}, ["attention_k_eq_v", "True"]),
        ({"attention_bias": True}, ["attention_bias", "True"]),
        ({"use_bidirectional_attention": "all"}, ["use_bidirectional_attention", "'all'"]),
        ({"hidden_activation": "silu"}, ["hidden_activation", "'silu'", "gelu_pytorch_tanh"]),
        ({f"{ROPE}/rope_type": "linear", f"{ROPE}/factor": 2.0}, ["rope_type 'linear'", "full_attention"]),
        ({f"{ROPE}/rope_type": "yarn", f"{ROPE}/factor": 2.0, f"{ROPE}/original_max_position_embeddings": 64}, ["rope_type 'yarn'", "full_attention"]),
        ({"rope_parameters/sliding_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, ["rope_type 'dynamic'", "sliding_attention"]),
        ({"hidden_size_per_layer_input": 0}, ["hidden_size_per_layer_input 0"]),
        ({"vocab_size_per_layer_input": 500}, ["vocab_size_per_layer_input 500", "vocab_size 512"]),
        ({"num_kv_shared_layers": 0}, ["num_kv_shared_layers 0"]),
        ({"num_kv_shared_layers": 10}, ["num_kv_shared_layers 10"]),
        ({"num_kv_shared_layers": 7}, ["num_kv_shared_layers 7"]),
        ({"layer_types": ["full_attention"] * 10}, ["layer"]),
        ({"layer_types/0": "chunked_attention"}, ["layer_types", "chunked_attention"]),
        ({"layer_types": ["full_attention"]}, ["layer"]),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, ["num_key_value_heads 2", "num_attention_heads 3"]),
        ({"sliding_window": 0}, ["sliding_window 0"]),
        ({"sliding_window": 4}, ["sliding_window 4"]),
        ({"max_position_embeddings": 4}, ["max_position_embeddings 4"]),
    ],
)  # fmt: skip
def test_what_the_graphs_do_not_build_is_refused(target, changes, parts):
    edit_json(target / "config.json", changes)
    message = refused(open_target, target)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [96, 160])
def test_embedding_scales_are_those_of_transformers(tmp_path, hidden, dtype):
    shape = PairShape(hidden=hidden, per_layer=24, layers=4, period=2, shared=2, intermediate=32, vocab=64)
    random_target(shape).to(dtype).save_pretrained(tmp_path)
    model = Gemma4ForCausalLM.from_pretrained(tmp_path, dtype="auto").model
    config = open_target(str(tmp_path)).config
    assert config.embedding_scale == model.embed_tokens.embed_scale.to(model.embed_tokens.weight.dtype).item()
    assert config.per_layer_scale == model.embed_tokens_per_layer.embed_scale.to(dtype).item()


@pytest.mark.parametrize(
    ("hidden", "dtype", "scale"),
    [
        (1536, torch.bfloat16, 39.25),
        (2560, torch.bfloat16, 50.5),
        (1536, torch.float32, torch.tensor(1536.0).sqrt().item()),
    ],
)
def test_embedding_scale_of_the_official_sizes(pair_of, hidden, dtype, scale):
    hf = Gemma4TextConfig.from_pretrained(pair_of(SHAPE)[0])
    hf.hidden_size = hidden
    assert target_config(hf, dtype).embedding_scale == scale


# Tokens, generation defaults and the chat template.


def test_token_ids_come_from_the_generation_config(target):
    changes = {"eos_token_id": [7, 9, 50], "bos_token_id": 5, "pad_token_id": 3}
    edit_json(target / "generation_config.json", changes)
    tokens = tokens_spec(open_target(str(target)))
    assert (tokens.eos, tokens.bos, tokens.pad) == ((7, 9, 50), 5, 3)


@pytest.mark.parametrize("multimodal", [False, True])
def test_token_ids_of_the_config_without_a_generation_config(target, multimodal):
    (target / "generation_config.json").unlink()
    edit_json(target / "config.json", {"eos_token_id": 11, "bos_token_id": 12, "pad_token_id": 13})
    if multimodal:
        make_multimodal(target)
    tokens = tokens_spec(open_target(str(target)))
    assert (tokens.eos, tokens.bos, tokens.pad) == ((11,), 12, 13)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"eos_token_id": [1, 512]}, ["eos_token_id", "512"]),
        ({"eos_token_id": []}, ["eos_token_id", "[]"]),
        ({"bos_token_id": -1}, ["bos_token_id", "-1"]),
        ({"pad_token_id": "0"}, ["generation_config.json"]),
    ],
)
def test_bad_token_ids_are_refused(target, changes, parts):
    edit_json(target / "generation_config.json", changes)
    message = refused(lambda source: tokens_spec(open_target(source)), target)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (3, "constant")),
        ({"num_assistant_tokens": 20}, (16, "constant")),
        ({"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "heuristic"}, (5, "heuristic")),
        ({"num_assistant_tokens": REMOVED, "num_assistant_tokens_schedule": REMOVED}, (6, "constant")),
    ],
)
def test_drafting_defaults_come_from_the_drafter(drafter, changes, expected):
    edit_json(drafter / "generation_config.json", changes)
    assert drafting_defaults(open_drafter(str(drafter))) == expected


@pytest.mark.parametrize(("key", "value"), [("num_assistant_tokens", 0), ("num_assistant_tokens_schedule", "random")])
def test_bad_drafting_defaults_are_refused(drafter, key, value):
    edit_json(drafter / "generation_config.json", {key: value})
    assert f"{key} {value!r}" in refused(lambda source: drafting_defaults(open_drafter(source)), drafter)


def test_a_generation_config_that_is_no_json_is_refused(target):
    (target / "generation_config.json").write_text("{")
    config = open_target(str(target)).checkpoint.config
    with pytest.raises(ValueError, match=re.escape(str(target / "generation_config.json"))):
        generation_config(target, config)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "A", "tokenizer_config.json": '{"chat_template": "B"}'}, "A"),
        ({"tokenizer_config.json": '{"chat_template": "B"}'}, "B"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "C"}]}'}, "C"),
        ({"tokenizer_config.json": "{}"}, None),
        ({}, None),
    ],
)
def test_chat_template(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert chat_template(tmp_path) == expected


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b'{"chat_template": 5}'])
def test_a_bad_tokenizer_config_is_named(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    assert str(tmp_path / "tokenizer_config.json") in refused(lambda folder: chat_template(Path(folder)), tmp_path)
