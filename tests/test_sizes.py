"""The official sizes: their figures, and checkpoints that are said to have one and do not. Nothing is exported."""

from copy import deepcopy

import pytest
import torch
from transformers import AutoConfig, Gemma4Config

from export.__main__ import main
from export.config import check_pair, drafter_config, target_config
from export.quant import RECIPES
from export.random_weights import random_pair
from export.sizes import SIZES, check_size, drafter_of, target_of
from export.space import weight_bytes

from .edits import error_line
from .pairs import TINY, PairShape

FACTS = {  # layers with their own KV, donors
    "e2b": (15, {"sliding": 13, "full": 14}),
    "e4b": (24, {"sliding": 22, "full": 23}),
}


@pytest.mark.parametrize("name", SIZES)
def test_figures(name):
    target, drafter = target_config(target_of(SIZES[name]), torch.bfloat16), drafter_config(drafter_of(SIZES[name]))
    check_pair(target, drafter)
    assert (len(target.own_layers), target.donors) == FACTS[name]
    assert target.head_dims == drafter.head_dims == {"sliding": 256, "full": 512}
    assert (drafter.num_centroids, drafter.centroid_top_k, drafter.vocab_size) == (2048, 32, 262_144)


@pytest.mark.parametrize("name", SIZES)
def test_a_checkpoint_of_the_size_is_taken(name, tmp_path):
    """Saved files leave out keys that equal a class default, and keep the text's in a multimodal config."""
    target, drafter = target_of(SIZES[name]), drafter_of(SIZES[name])
    Gemma4Config(text_config=target, dtype="bfloat16").save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "assistant")
    check_size(name, *(AutoConfig.from_pretrained(tmp_path / part) for part in ("target", "assistant")))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("e2b", {"hidden_size": 2048}, "hidden_size is 2048, e2b has 1536: use custom"),
        ("e2b", {"sliding_window": 1024}, "sliding_window is 1024, e2b has 512: use custom"),
        ("e2b", {"use_double_wide_mlp": False}, "use_double_wide_mlp is False, e2b has True: use custom"),
        ("e4b", {"num_kv_shared_layers": 20}, "num_kv_shared_layers is 20, e4b has 18: use custom"),
        ("e4b", {"final_logit_softcapping": None}, "final_logit_softcapping is None, e4b has 30.0: use custom"),
        ("e4b", {"layer_types": ["full_attention"] * 42}, "layer_types[0] is full_attention, e4b has sliding_attention: use custom"),
    ],
)  # fmt: skip
def test_the_first_field_that_differs_is_named(name, changes, message):
    target = deepcopy(target_of(SIZES[name]))
    for field, value in changes.items():
        setattr(target, field, value)
    with pytest.raises(ValueError) as caught:
        check_size(name, target, drafter_of(SIZES[name]))
    assert str(caught.value) == message


def test_the_other_size_is_named():
    e2b, e4b = SIZES["e2b"], SIZES["e4b"]
    for name, target, drafter, message in (
        ("e2b", e4b, e4b, "hidden_size is 2560, e2b has 1536: use e4b"),
        ("e4b", e2b, e2b, "hidden_size is 1536, e4b has 2560: use e2b"),
        ("e2b", e2b, e4b, "backbone_hidden_size is 2560, e2b's drafter has 1536: give a drafter of e2b with --drafter"),
    ):
        with pytest.raises(ValueError) as caught:
            check_size(name, target_of(target), drafter_of(drafter))
        assert str(caught.value) == message


def test_a_checkpoint_of_another_size_is_refused_before_anything_is_written(pair_of, tmp_path, capsys):
    target, drafter = pair_of(PairShape(layers=4, period=2, shared=2, intermediate=64))
    for name, hidden in (("e2b", 1536), ("e4b", 2560)):
        arguments = [name, "--checkpoint", target, "--drafter", drafter, "--out", tmp_path / "bundle"]
        assert f"hidden_size is 64, {name} has {hidden}: use custom" in error_line(main, arguments, capsys)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["custom"], "required: --checkpoint, --drafter"),
        (["custom", "--checkpoint", "a"], "required: --drafter"),
        (["e2b", "--random-weights", "--checkpoint", "a"], "--checkpoint and --random-weights exclude each other"),
        (["e4b", "--random-weights", "--drafter", "a"], "--drafter and --random-weights exclude each other"),
        (["tiny", "--checkpoint", str(TINY / "target/config.json")], "config.json' is a file; give its folder"),
        (["e2b", "--tokenizer", "a"], "--tokenizer is for --random-weights"),
        (["e2b", "--random-weights", "-1"], "--random-weights -1: a seed is at least 0"),
        (["e2b", "--random-weights", "x"], "invalid int value: 'x'"),
        (["tiny", "--fp32", "--ple-bits", "4"], "--ple-bits 4: fp32 quantizes no table; leave it out"),
        (["e2b", "--fp32", "--ple-bits", "8", "--random-weights"], "--ple-bits 8: fp32 quantizes no table"),
        (["tiny", "--ple-bits", "5"], "--ple-bits: invalid choice: 5"),
        (["tiny", "--small", "--int4"], "not allowed with argument --small"),
        (
            ["tiny", "--random-weights"],
            "unrecognized arguments: --random-weights; see python -m export tiny --help",
        ),
        (
            ["e2b", "--random-weights", "--tokenizer", "no/such"],
            "--tokenizer no/such: no tokenizer.json; give that file",
        ),
    ],
)
def test_options_that_do_not_fit(arguments, message, tmp_path, capsys):
    assert message in error_line(main, [*arguments, "--out", tmp_path / "bundle"], capsys)
    assert not (tmp_path / "bundle").exists()


BESIDE_BYTES = 13_600_000 + 262_144 * 4 + 1_000_000  # tokenizer.json, without white space; token_ordering; graphs


@pytest.mark.parametrize("backend", RECIPES)
@pytest.mark.parametrize(
    ("recipe", "ple_bits", "bar"),
    [("small", 4, 2_580_000_000), ("int4", None, 4_100_000_000), ("int8", None, 4_900_000_000)],
)
def test_bytes_of_e2b(backend, recipe, ple_bits, bar):
    """Everything that a bundle for one backend holds."""
    with random_pair(target_of(SIZES["e2b"]), drafter_of(SIZES["e2b"]), None) as pair:
        assert weight_bytes(*pair, recipe, (backend,), ple_bits) + BESIDE_BYTES <= bar


@pytest.mark.parametrize(("backend", "written"), [("onnx", 2_474_494_000), ("executorch", 2_442_371_000)])
def test_computed_bytes_are_those_of_a_real_export(backend, written):
    """python -m export e2b --small --ple-bits 4 --random-weights: graphs' weights and embeddings/, without what is counted
    beside the weights (token_ordering). Pages and a .pte's own head are the rest."""
    with random_pair(target_of(SIZES["e2b"]), drafter_of(SIZES["e2b"]), None) as pair:
        counted = weight_bytes(*pair, "small", (backend,), 4)
    assert 0 < written - counted < 8_000_000
