"""Quantization: bounded error, scales that bfloat16 can hold, packing that a naive reader undoes, and recipes that give
each kind of tensor its form. What an export reports is recomputed by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from export.backends import Lowered
from export.graphs import CrossDecoder, Drafter, SelfDecoder
from export.lower_onnx import pack
from export.package import summarize
from export.quant import RECIPES, QuantSpec, TensorError, dequantize, quantize, tables
from export.weights import open_drafter, open_target
from runtime_py import manifest as contract

from .pairs import PairShape

SPECS = [
    QuantSpec(8, 64),
    QuantSpec(8, 16),
    QuantSpec(8, None),
    QuantSpec(4, 32, negative_scales=True),
    QuantSpec(4, 16, negative_scales=True),
    QuantSpec(4, 32),
    QuantSpec(4, 128),
]
specs = st.sampled_from(SPECS)


@st.composite
def matrices(draw) -> torch.Tensor:
    """[O, I] of any small size, rows of very different magnitude, some exactly zero."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 150))
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    magnitude = 10.0 ** torch.randint(-6, 7, (rows, 1))
    return torch.randn(rows, columns) * magnitude * (torch.rand(rows, 1) > 0.1)


def spread(scale: torch.Tensor, spec: QuantSpec, columns: int) -> torch.Tensor:
    """The scale of each element [O, I]."""
    return scale.repeat_interleave(spec.width(columns), 1)[:, :columns]


@settings(max_examples=200, deadline=None)
@given(matrices(), specs)
def test_round_trip_is_within_half_a_step(weight, spec):
    q, scale = quantize(weight, spec)
    columns = weight.shape[1]
    assert q.shape == weight.shape and scale.shape == (weight.shape[0], spec.groups(columns))
    error, steps = (dequantize(q, scale, spec.width(columns)) - weight).abs(), spread(scale, spec, columns)
    cut = weight / steps > (7.5 if spec.bits == 4 else 128)  # 8 has no 4 bits
    assert ((error <= 0.501 * steps.abs()) | cut).all()


@settings(max_examples=200, deadline=None)
@given(matrices(), specs)
def test_values_and_scales_are_in_range(weight, spec):
    q, scale = quantize(weight, spec)
    assert torch.equal(scale, scale.bfloat16().float()) and (scale != 0).all()
    assert spec.negative_scales or (scale > 0).all()
    lowest, highest = (-127, 127) if spec.bits == 8 else (-8, 7)
    assert q.dtype == torch.int8 and q.min() >= lowest and q.max() <= highest
    largest = weight.abs().amax(1)
    assert (q.abs().amax(1)[largest > 0] >= (127 if spec.bits == 8 else 7)).all()  # the range is used


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 150), specs, st.integers(0, 1 << 30))
def test_quantized_values_survive_another_round(columns, spec, seed):
    torch.manual_seed(seed)
    first = dequantize(*quantize(torch.randn(3, columns), spec), spec.width(columns))
    again = dequantize(*quantize(first, spec), spec.width(columns))
    assert torch.equal(first, again)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 1 << 30))
def test_weights_on_the_lattice_of_q4_0_keep_their_values(rows, groups, seed):
    """llama.cpp: w = d * q, q in -8..7, where d = (the value of largest magnitude) / -8 may be negative."""
    torch.manual_seed(seed)
    d = (torch.randn(rows, groups, 1) * 0.02).bfloat16().float()
    q = torch.randint(-8, 8, (rows, groups, 32)).float()
    q[..., 0] = -8
    weight = (d * q[..., torch.randperm(32)]).flatten(1)
    assert torch.equal(
        dequantize(*quantize(weight, RECIPES["onnx"]["int4"].spec("self_decoder.layers.0.mlp.up_proj", 32)), 32), weight
    )


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([spec for spec in SPECS if spec.bits == 4]), st.integers(0, 1 << 30))
def test_four_bit_scales_are_no_worse_than_the_largest_value_over_seven(spec, seed):
    torch.manual_seed(seed)
    weight = torch.randn(4, 4 * spec.group)
    blocks = weight.view(4, 4, spec.group)
    scale = (blocks.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
    simple = ((blocks / scale).round().clamp(-8, 7) * scale - blocks).square().sum((-1, -2))
    found = dequantize(*quantize(weight, spec), spec.group).view_as(blocks) - blocks
    assert (found.square().sum((-1, -2)) <= simple * 1.0001).all()


def unpack(stored: torch.Tensor, bits: int, columns: int) -> list[list[int]]:
    """MatMulNBits' B [O, blocks, bytes] -> integers, one by one: low nibble first, zero point 2^(bits - 1)."""
    rows = []
    for row in stored.flatten(1).tolist():
        values = row if bits == 8 else [nibble for byte in row for nibble in (byte & 15, byte >> 4)]
        rows.append([value - (1 << (bits - 1)) for value in values][:columns])
    return rows


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 100), st.sampled_from([(8, 64), (8, 16), (4, 32), (4, 16)]), st.integers(0, 99)
)
def test_pack_against_a_naive_reader(rows, columns, form, seed):
    bits, group = form
    torch.manual_seed(seed)
    q = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (rows, columns), dtype=torch.int8)
    stored = pack(q, bits, group)
    assert stored.dtype == torch.uint8 and stored.shape == (rows, -(-columns // group), group * bits // 8)
    assert unpack(stored, bits, columns) == q.tolist()
    padding = unpack(stored, bits, 10**9)
    assert all(value == 0 for row in padding for value in row[columns:])


# Recipes.

INT8, INT4, INT4_WIDE = (
    QuantSpec(bits, group, negative_scales=bits == 4, scale_dtype=torch.float32)
    for bits, group in ((8, 64), (4, 32), (4, 128))
)
KINDS = (
    "self_decoder.layers.0.self_attn.q_proj",
    "cross_decoder.layers.15.mlp.down_proj",
    "self_decoder.layers.3.per_layer_model_projection",
    "cross_decoder.lm_head",
    "drafter.pre_projection",
    "drafter.layers.3.self_attn.o_proj",
    "drafter.lm_head",
)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("fp32", [None] * 7),
        ("int8", [INT8] * 7),
        ("int4", [INT4] * 3 + [INT8] * 4),
        ("small", [INT4_WIDE] * 4 + [INT8] * 3),
    ],
)
def test_recipes(recipe, expected):
    assert [RECIPES["onnx"][recipe].spec(name, 128) for name in KINDS] == expected


@pytest.mark.parametrize(
    ("recipe", "expected"), [("int8", [INT8] * 3), ("int4", [INT4, INT4, INT8]), ("small", [INT4, INT4, INT8])]
)
def test_onnxruntime_takes_whole_groups_of_4_bits(recipe, expected):
    """What no group divides has 8 bits, in blocks whose last is shorter; and so have drafter and int4's head throughout."""
    found = RECIPES["onnx"][recipe]
    assert [found.spec("self_decoder.layers.0.mlp.up_proj", columns) for columns in (96, 64, 80)] == expected
    assert {found.spec("drafter.layers.0.mlp.up_proj", columns) for columns in (64, 96, 80, 128)} == {INT8}
    head = [INT4_WIDE, INT4, INT8] if recipe == "small" else [INT8] * 3
    assert [found.spec("cross_decoder.lm_head", columns) for columns in (128, 96, 80)] == head


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("fp32", (None, None, None)),
        ("int8", (QuantSpec(8, 64), QuantSpec(8, 256), QuantSpec(8, None))),
        ("int4", (QuantSpec(8, 64), QuantSpec(8, 256), QuantSpec(8, None))),
        ("small", (QuantSpec(4, 128, True), QuantSpec(8, 256), QuantSpec(4, 32, True))),
    ],
)
def test_tables_of_a_recipe(recipe, expected):
    assert tables(recipe, 256) == dict(zip(("token", "per_layer", "drafter_head"), expected, strict=True))


@pytest.mark.parametrize(("size", "block"), [(256, 128), (128, 128), (32, 32), (160, 80), (48, 48), (130, 65)])
@pytest.mark.parametrize("recipe", ["int8", "int4", "small"])
def test_four_bit_blocks_of_the_per_layer_table_end_where_a_layer_ends(recipe, size, block):
    found, usual = tables(recipe, size, 4), tables(recipe, size)
    assert found.pop("per_layer") == QuantSpec(4, block, negative_scales=True)
    assert usual.pop("per_layer") == tables(recipe, size, 8)["per_layer"] == QuantSpec(8, 256) and found == usual


@pytest.mark.parametrize(("recipe", "bits"), [("fp32", 4), ("fp32", 8), ("int8", 5), ("small", 32)])
def test_bits_that_the_per_layer_table_cannot_have(recipe, bits):
    with pytest.raises(ValueError, match=f"--ple-bits {bits}"):
        tables(recipe, 256, bits)


@pytest.mark.parametrize(("query_heads", "invariant"), [(4, True), (2, False)])
def test_one_query_head_per_kv_head_is_not_row_invariant(pair_of, query_heads, invariant):
    target, drafter = pair_of(PairShape(kv_heads=2, query_heads=query_heads))
    pair = open_target(str(target)), open_drafter(str(drafter))
    lowered = {name: Lowered(name, "int8", 512, {}, {}, []) for name in RECIPES}
    errors = [TensorError("embeddings.per_layer", 8, 1, 0.1)]
    found = {name: summarize(errors, one, pair).row_invariant for name, one in lowered.items()}
    assert found == {"onnx": invariant, "executorch": True}


def test_executorch_takes_whole_groups_of_32_only():
    rows = QuantSpec(8, None, scale_dtype=torch.float32)
    recipe = RECIPES["executorch"]["int4"]
    assert recipe.spec("self_decoder.layers.0.mlp.up_proj", 96) == QuantSpec(4, 32)
    assert recipe.spec("self_decoder.layers.0.mlp.up_proj", 80) == rows
    assert recipe.spec("cross_decoder.lm_head", 96) == recipe.spec("drafter.pre_projection", 96) == rows
    small = RECIPES["executorch"]["small"]
    found = [small.spec("cross_decoder.lm_head", columns) for columns in (1536, 128, 96, 80)]
    assert found == [QuantSpec(4, 128), QuantSpec(4, 128), QuantSpec(4, 32), rows]
    assert small.spec("drafter.pre_projection", 128) == rows


@pytest.mark.parametrize("recipe", RECIPES["onnx"])
def test_only_linears_are_quantized(pair_of, recipe):
    folders = map(str, pair_of(PairShape()))
    target, drafter = open_target(next(folders)), open_drafter(next(folders))
    for graph, weights in ((SelfDecoder, target), (CrossDecoder, target), (Drafter, drafter)):
        with torch.device("meta"):
            module = graph(weights.config, RECIPES["onnx"][recipe])
        for buffer, _, spec in weights.state(module):
            is_linear = buffer.endswith(("proj.weight", "projection.weight", "gate.weight", "lm_head.weight"))
            assert (spec is not None) == (is_linear and recipe != "fp32"), buffer


# What an export reports.


def relative_error(weight: torch.Tensor, bits: int, group: int) -> float:
    """From the definition: a block's largest value is 127, or the better of 7 and -8."""
    error = 0.0
    for block in weight.double().split(group, 1):  # [O, group], one of each row
        largest = block.gather(1, block.abs().argmax(1, keepdim=True))
        steps = [largest / 127] if bits == 8 else [largest / 7, largest / -8]
        error += float(
            torch.stack([_block_errors(block, step.bfloat16().double(), bits) for step in steps]).amin(0).sum()
        )
    return math.sqrt(error) / float(weight.double().norm())


def _block_errors(block: torch.Tensor, step: torch.Tensor, bits: int) -> torch.Tensor:
    lowest, highest = (-127, 127) if bits == 8 else (-8, 7)
    return ((block / step).round().clamp(lowest, highest) * step - block).square().sum(1)


UP, DOWN = "drafter.layers.0.mlp.up_proj.weight", "self_decoder.layers.1.mlp.down_proj.weight"
HEAD, PER_LAYER, DRAFTER_HEAD = "cross_decoder.lm_head.weight", "embeddings.per_layer", "embeddings.drafter_head"


@pytest.mark.parametrize(
    ("recipe", "ple_bits", "forms"),
    [
        ("int4", None, {DOWN: (8, 64), HEAD: (8, 64), UP: (8, 64), PER_LAYER: (8, 256), DRAFTER_HEAD: (8, 64)}),
        ("small", 4, {DOWN: (8, 64), HEAD: (4, 32), UP: (8, 64), PER_LAYER: (4, 32), DRAFTER_HEAD: (4, 32)}),
    ],
)
def test_reported_errors_and_share(pair_of, tmp_path, recipe, ple_bits, forms):
    from export.package import export_package

    shape = PairShape(layers=4, period=2, shared=2, intermediate=80)
    folders = pair_of(shape)
    package = export_package("tiny", *map(str, folders), recipe, tmp_path / "bundle", ple_bits=ple_bits)
    reported = {error.name: error for error in package.errors["onnx"]}
    weights, draft = (load_file(folder / "model.safetensors") for folder in folders)
    tensors = {
        DOWN: weights["model.layers.1.mlp.down_proj.weight"],
        HEAD: weights["model.embed_tokens.weight"],
        UP: draft["model.layers.0.mlp.up_proj.weight"],
        PER_LAYER: weights["model.embed_tokens_per_layer.weight"],
        DRAFTER_HEAD: draft["model.embed_tokens.weight"],
    }
    for name, form in forms.items():
        assert reported[name].bits == form[0]
        assert reported[name].relative == pytest.approx(relative_error(tensors[name], *form), rel=1e-4), name
        assert reported[name].size_bytes == tensors[name].nbytes
    quality = contract.load(tmp_path / "bundle").backends["onnx"].quantization
    worst = max(package.errors["onnx"], key=lambda error: error.relative)
    assert (quality.worst_tensor, quality.worst_relative_error) == (worst.name, worst.relative)
    per_layer = reported[PER_LAYER]
    assert (quality.per_layer_bits, quality.per_layer_relative_error) == (per_layer.bits, per_layer.relative)
    assert quality.title == ("small, ple-bits 4" if recipe == "small" else "int4")
    tensors = [*weights.items(), *draft.items()]
    plain = ("norm.weight", "layernorm.weight", "layer_scalar", "centroids.weight", "token_ordering")
    total = sum(tensor.nbytes for _, tensor in tensors)
    quantized = sum(tensor.nbytes for name, tensor in tensors if not name.endswith(plain))
    assert quality.quantized_share == pytest.approx(quantized / total, abs=1e-12)
