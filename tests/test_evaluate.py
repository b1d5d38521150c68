"""eval: perplexity is Transformers' own, a bundle is at no distance from itself, int8 at a small one from fp32, and only
bundles of one checkpoint are compared."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime_py import evaluate as module
from runtime_py import manifest as contract
from runtime_py import memory
from runtime_py.__main__ import main
from runtime_py.evaluate import prefixes, score_token, softmax, windows

from .conftest import BACKENDS
from .edits import edit_json, error_line
from .pairs import PairShape
from .reference import load_tiny, transformers_pair
from .test_bundle import SHAPE
from .texts import TINY
from .threads import THREADS

CONTEXT = 200  # crosses a chunk's end, and is no multiple of a block
FP32 = 1e-5  # of a mean loss; measured 4e-7
KL_INT8 = 0.002  # nats, mean; measured 2.7e-4


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Held-out lines, 1,000 tokens and more."""
    prompts = json.loads((TINY / "prompts.json").read_text(encoding="utf-8"))
    path = tmp_path_factory.mktemp("text") / "held-out.txt"
    path.write_text("\n".join(prompt["text"] for prompt in prompts), encoding="utf-8")
    return path


@pytest.fixture
def told(capsys):
    """Runs eval -> its JSON object"""

    def run(bundle: Path, text: Path, *options: object) -> dict:
        backend = next(iter(contract.load(bundle).backends))
        threads = ("--threads", THREADS[backend], "--context", CONTEXT, "--json")
        assert main(["eval", str(bundle), "--text", str(text), *map(str, (*threads, *options))]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def losses_of_transformers(ids: list[int], context: int) -> list[float]:
    """-log p of every id after bos and those before it in its window, in float32 Transformers."""
    losses = []
    reference = transformers_pair((TINY / "target", TINY / "assistant"))
    for start in range(0, len(ids), context - 1):
        window = [2, *ids[start : start + context - 1]]
        logits = torch.from_numpy(reference.rows(window).logits).double().log_softmax(-1)
        losses += [-logits[i, token].item() for i, token in enumerate(window[1:])]
    return losses


@pytest.mark.parametrize("limit", [1, 7, 199, 200, 450])
def test_perplexity_is_that_of_transformers_logits(bundle_of, told, text, limit):
    bundle = bundle_of("tiny", "fp32")
    found = told(bundle, text, "--tokens", limit, "--draft-tokens", 0)
    ids = load_tiny(bundle, 0).text.encode_prompt(text.read_text(encoding="utf-8"))[1:]
    want = losses_of_transformers(ids[:limit], CONTEXT)
    assert (found["tokens"], found["context"], found["windows"]) == (limit, CONTEXT, math.ceil(limit / 199))
    assert found["bundle"]["loss"] == pytest.approx(sum(want) / limit, abs=FP32)
    assert found["bundle"]["perplexity"] == pytest.approx(math.exp(found["bundle"]["loss"]))
    assert found["against"] is found["distance"] is found["bundle"]["accepted"] is None


def test_the_whole_text_counts_once(bundle_of, told, text):
    bundle = bundle_of("tiny")
    ids = load_tiny(bundle, 0).text.encode_prompt(text.read_text(encoding="utf-8"))
    assert told(bundle, text, "--draft-tokens", 0)["tokens"] == len(ids) - 1 > 5 * CONTEXT
    parts = list(windows(list(range(10)), 99, 4))
    assert parts == [[99, 0, 1, 2], [99, 3, 4, 5], [99, 6, 7, 8], [99, 9]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_is_near_float32_and_both_accept_drafts(bundle_of, told, text, backend):
    found = told(bundle_of("tiny", "int8", backend), text, "--against", bundle_of("tiny", "fp32"), "--tokens", 600)
    assert [found[who]["backend"] for who in ("bundle", "against")] == [backend, "onnx"]
    assert [found[who]["recipe"] for who in ("bundle", "against")] == ["int8", "fp32"]
    distance = found["distance"]
    assert 0 < distance["kl_median"] < distance["kl_mean"] < KL_INT8 and distance["kl_mean"] < distance["kl_max"] < 1
    assert 0.9 < distance["agreement"] <= 1
    assert found["bundle"]["perplexity"] == pytest.approx(found["against"]["perplexity"], rel=0.02)
    assert found["continuations"] == {"count": 9, "tokens": 32}  # 600 tokens have nine pieces of 64
    for who in ("bundle", "against"):
        first, *rest = found[who]["accepted"]
        assert len(rest) == 2  # the drafter's own number is 3
        assert first["accepted"] > 0.5 * first["drafted"] > 0
        assert all(place["accepted"] <= first["accepted"] for place in rest)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bundle_is_at_no_distance_from_itself(bundle_of, told, text, backend):
    bundle = bundle_of("tiny", "int8", backend)
    found = told(bundle, text, "--against", bundle, "--tokens", 300, "--draft-tokens", 2)
    assert found["distance"] == {"kl_mean": 0, "kl_median": 0, "kl_max": 0, "agreement": 1}
    assert found["bundle"] == found["against"]
    assert len(found["bundle"]["accepted"]) == 2


def test_scores_are_what_they_are_called():
    rows = np.array([[0, 1, 3], [0, 2, 1]], np.float32)
    p, q = np.exp(rows[1]) / np.exp(rows[1]).sum(), np.exp(rows[0]) / np.exp(rows[0]).sum()
    score = score_token(1, rows)
    assert score.losses == pytest.approx((-math.log(q[1]), -math.log(p[1])), abs=1e-6)
    assert score.kl == pytest.approx((p * np.log(p / q)).sum(), abs=1e-6)  # of the reference, the second
    assert score.agrees is False
    assert score_token(1, rows[[0, 0]])[1:] == (0, True)
    assert score_token(2, rows[:1])[1:] == (None, None)
    assert softmax(rows[0] + np.float32(1e4)).log_total == pytest.approx(softmax(rows[0]).log_total)
    with pytest.raises(ValueError, match="logits are not finite"):
        score_token(0, [np.array([np.nan, 0, 1], np.float32)])


def test_prefixes_lie_apart():
    parts = prefixes(list(range(5000)), 99)
    assert len(parts) == 32 and {len(part) for part in parts} == {65} and {part[0] for part in parts} == {99}
    assert len({token for part in parts for token in part}) == 32 * 64 + 1
    assert prefixes([5, 6], 99) == [[99, 5, 6]]


def test_no_more_than_a_block_of_logits_is_asked_for(bundle_of, text, monkeypatch):
    pair, rows = load_tiny(bundle_of("tiny"), 0), []
    forward = pair.target.forward
    monkeypatch.setattr(pair.target, "forward", lambda cache, ids: rows.append(len(ids)) or forward(cache, ids))
    ids = list(range(110, 110 + 300))
    found = module.evaluate([(Path("a"), pair)], ids, 301, 0, lambda count: None)
    assert rows == [64, 64, 64, 64, 44]
    assert (found.tokens, found.windows) == (300, 1)


def test_progress_adds_up_to_the_work(bundle_of):
    pair, done = load_tiny(bundle_of("tiny"), 2), []
    ids = list(range(110, 110 + 200))
    module.evaluate([(Path("a"), pair), (Path("b"), pair)], ids, 64, 2, done.append)
    assert sum(done) == module.work(ids, [pair, pair], 2) == 200 + 2 * 3 * 32


def test_lines_say_what_was_counted(bundle_of, text, capsys):
    bundle = bundle_of("tiny")
    options = ["eval", str(bundle), "--text", str(text), "--tokens", "300", "--threads", "1"]
    assert main([*options, "--against", str(bundle)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == f"300 tokens of {text} in 1 windows of 512, 1 threads"
    assert lines[1].startswith("bundle   tiny int8 on onnx  perplexity ")
    assert lines[2].startswith("against  tiny int8 on onnx  perplexity ")
    assert "mean 0, median 0, max 0 nats; the same best token at 100.00% (300 of 300)" in lines[3]
    assert lines[4] == "accepted drafts by position, continuing 4 prefixes, 32 tokens each, greedily:"
    assert lines[5].startswith("bundle   0.") and lines[5].endswith(" rounds)")
    assert err == ""  # no bar where nobody watches
    assert main([*options, "--draft-tokens", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_damaged_drafter_is_said_and_the_text_scored(bundle_of, text, tmp_path, capsys):
    copy = Path(shutil.copytree(bundle_of("tiny"), tmp_path / "bundle"))
    (copy / "onnx/drafter.onnx").unlink()
    assert main(["eval", str(copy), "--text", str(text), "--tokens", "20", "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("warning: drafting is off: ") and "drafter.onnx: file is missing" in out.splitlines()[-1]


# Refusals


def refused(capsys, bundle: Path, text: Path, *options: object) -> str:
    return error_line(main, ["eval", bundle, "--text", text, "--threads", 1, *options], capsys)


def test_other_checkpoints_are_refused_by_name(bundle_of, text, capsys):
    tiny = bundle_of("tiny")
    other = bundle_of(PairShape())
    line = refused(capsys, tiny, text, "--against", other)
    assert "vocabularies of 1024 and 512 tokens cannot be compared; give two bundles" in line
    line = refused(capsys, other, text, "--against", bundle_of(SHAPE))
    assert "not the same checkpoint: target config.json is " in line


@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("checkpoints/target/files/model.safetensors", "target model.safetensors is "),
        ("checkpoints/drafter/files/model.safetensors", "drafter model.safetensors is "),
        ("files/tokenizer.json/sha256", "tokenizer.json is "),
        ("tokens/bos", "bos is 2, in the reference 1"),
        ("checkpoints/target/source", "target weights is None, in the reference seed 7"),
    ],
)
def test_what_differs_is_named(bundle_of, text, tmp_path, capsys, field, what):
    bundle, copy = bundle_of("tiny"), tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    changes = {field: "ab" * 32}
    if field == "tokens/bos":
        changes = {field: 1}
    elif field.endswith("source"):
        changes = {field: contract.RANDOM_WEIGHTS, "checkpoints/target/revision": "seed 7"}
    edit_json(copy / "manifest.json", changes)
    line = refused(capsys, bundle, text, "--against", copy)
    assert f"not the same checkpoint: {what}" in line and "exported from the same checkpoint" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", 0], "--tokens 0 is below 1; leave it out"),
        (["--context", 1], "--context 1 is below 2; a window holds"),
        (["--context", 4096], "--context 4096 is outside 1..2048, what the bundle's onnx graphs take"),
        (["--draft-tokens", 17], "--draft-tokens 17 is outside 0..16; "),
        (["--threads", 0], "--threads 0 is outside 1..256; "),
        (["--backend", "executorch"], "the bundle has files for onnx, not for executorch; "),
        (["--against-backend", "onnx"], "--against-backend onnx needs --against BUNDLE"),
        (["--against", "nowhere"], "nowhere: no manifest.json"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_bad_option_is_one_line(bundle_of, text, capsys, options, message):
    assert message in refused(capsys, bundle_of("tiny"), text, *options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory); give a text file in UTF-8"),
        (b"", "the text has no tokens; give a file that holds some"),
        (b"\xff\xfe", "no UTF-8 ("),
    ],
)
def test_bad_text_is_one_line(bundle_of, tmp_path, capsys, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    assert message in refused(capsys, bundle_of("tiny"), path)


def test_both_bundles_must_fit_at_once(bundle_of, text, capsys, monkeypatch):
    bundle = bundle_of("tiny")
    manifest = contract.load(bundle)
    one = memory.needs(manifest, "onnx", 512, 0, True).total_bytes
    monkeypatch.setattr(memory, "available_bytes", lambda: one + 1000)
    options = ("--tokens", 3, "--draft-tokens", 3)
    assert main(["eval", str(bundle), "--text", str(text), "--threads", "1", *map(str, options)]) == 0
    assert "MB available" in refused(capsys, bundle, text, "--against", bundle, *options)
    forced = ["eval", str(bundle), "--text", str(text), "--threads", "1", "--against", str(bundle), "--force"]
    assert main([*forced, *map(str, options)]) == 0
