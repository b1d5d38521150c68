"""Java says of a bundle that is damaged, or none, what runtime_py says of it; a damaged drafter only turns drafting off."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime_py import manifest as contract
from runtime_py.files import check_hashes
from runtime_py.loading import choose_backend

from .edits import REMOVED, edit_json
from .jvm import Jvm, Refused, needs_jdk
from .test_android_core import POLICIES, SHAPE, Both
from .test_fuzz import HUGE, NUMBERS, OTHERS, mutate, places


@pytest.fixture
def copy(bundle_of, tmp_path) -> Path:
    return Path(shutil.copytree(bundle_of(SHAPE), tmp_path / "bundle"))


def sentences(jvm: Jvm, bundle: Path) -> tuple[str | None, str | None]:
    """What Python and Java say of a bundle, None if it is whole."""
    try:
        manifest = contract.load(bundle)
        check_hashes(bundle, manifest, manifest.files)
        ours = None
    except ValueError as error:
        ours = str(error)
    try:
        jvm.ask("manifest", bundle=str(bundle))
        return ours, None
    except Refused as error:
        return ours, str(error)


def assert_alike(jvm: Jvm, bundle: Path) -> str | None:
    ours, theirs = sentences(jvm, bundle)
    assert theirs == ours
    return ours


@needs_jdk
def test_folders_that_are_no_bundle(jvm, tmp_path, bundle_of):
    assert assert_alike(jvm, bundle_of(SHAPE)) is None
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("nowhere", "empty", "file"):
        assert assert_alike(jvm, tmp_path / name)


@needs_jdk
def test_files_that_are_missing_cut_or_flipped(jvm, copy):
    for name, spec in contract.load(copy).files.items():
        whole = (copy / name).read_bytes()
        for damaged in (
            None,
            whole[:-1],
            b"",
            whole[: spec.size_bytes // 2] + b"\x55" + whole[spec.size_bytes // 2 + 1 :],
        ):
            if damaged is None:
                (copy / name).unlink()
            else:
                (copy / name).write_bytes(damaged)
            assert name in assert_alike(jvm, copy) or damaged == whole
            (copy / name).write_bytes(whole)


CHANGES = [
    {"schema_version": 3},
    {"schema_version": REMOVED},
    {"schema_version": "3"},
    {"name": 5},
    {"target/inv_freq/full": [0.5]},
    {"target/num_layers": True},
    {"graphs/drafter": REMOVED},
    {"files/tokenizer.json": REMOVED},
    {"files/..": {"sha256": "", "size_bytes": 1}},
    {"kv/donors/full": 0},
    {"kv/donors/full": REMOVED},
    {"kv/dtype": "bfloat16"},
    {"kv/layers/0/layer": 7},
    {"backends": {}},
    {"backends/onnx/max_context_tokens": 0},
    {"backends/onnx/loaded_bytes/drafter": -1},
    {"tokens/eos": [1, 99999]},
    {"drafter/schedule": "it's"},
    {"drafter/centroid_head/top_k": 0},
    {"target/per_layer_table/bits": 5},
    {"target/per_layer_table/data/shape": [3]},
    {"target/per_layer_table/data/dtype": "a\"b'c"},
    {"target/per_layer_table/scales": None},
    {"target/per_layer_table/multiplier": [1, {"a": 1e-7}]},
    {"sampling/temperature": 1e400},
    {"versions": {"torch": 2.5}},
    {"checkpoints/target/revision": 12345678901234567},
    {"target/vocab_size": (1 << 53) + 1},
    {"target/vocab_size": -(1 << 63)},
    {"target/per_layer_table/scales/dtype": "float16"},
    {"target/per_layer_table/zero_point": 300},
    {"kv/layers/1/kv_heads": 0},
    {"drafter/centroid_head/centroids/dtype": "bfloat16"},
    {"drafter/centroid_head/token_ordering/dtype": "float32"},
    {"drafter/centroid_head": None},
]


@needs_jdk
@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: str(changes).replace(str(REMOVED), "removed"))
def test_fields_that_are_wrong(jvm, copy, changes):
    edit_json(copy / "manifest.json", changes)
    assert assert_alike(jvm, copy)


OWN_WORDS = ("nested deeper than", "an integer of ", "no UTF-8 text")  # Python's limits are others


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def assert_manifests_alike(jvm: Jvm, folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    ours, theirs = sentences(jvm, folder)
    if theirs and any(words in theirs for words in OWN_WORDS):
        assert ours and theirs.startswith(f"{folder / 'manifest.json'}: ")
    else:
        assert theirs == ours


@needs_jdk
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_manifests(jvm, bundle_of, folder, data):
    mutated = json.loads((bundle_of(SHAPE) / "manifest.json").read_text(encoding="utf-8"))
    every = places(mutated)
    for _ in range(data.draw(st.integers(1, 3))):
        action = data.draw(st.sampled_from(["drop", "rename", "repeat", "replace", "replace"]))
        value = data.draw(
            st.sampled_from([*NUMBERS, *HUGE, *OTHERS, 1e16, -2.5e-5, 123456.789, "é\u0000'\"", [1], "\u2028"])
        )
        mutate(mutated, data.draw(st.sampled_from(every)), action, value)
    assert_manifests_alike(jvm, folder, json.dumps(mutated).encode("utf-8"))


@needs_jdk
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_manifests_that_are_no_json(jvm, bundle_of, folder, data):
    """One byte put in, taken out or changed: the same sentence with line and column."""
    content = bytearray((bundle_of(SHAPE) / "manifest.json").read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    byte = data.draw(st.sampled_from(b'"{}[],:\\ \n\r\t0-.eEuNtfIx\x01'))
    how = data.draw(st.sampled_from(["change", "insert", "cut", "remove"]))
    if how == "cut":
        del content[place:]
    else:
        content[place : place + (how != "insert")] = b"" if how == "remove" else bytes([byte])
    assert_manifests_alike(jvm, folder, bytes(content))


@needs_jdk
@pytest.mark.parametrize(
    "content",
    [
        *(b"", b" ", b"null", b"[]", b"[1,", b"[1 2]", b'{"a":1,}', b'{"a" 1}', b'{"a":}', b'{1:2}', b"\xef\xbb\xbf{}"),
        *(b'"\\x"', b'"\\u12"', b'"\\ud800"', b'"\\uD83D\\uDE00" x', b'"a\nb"', b'"', b'"\\', b"01", b"-", b"1.", b"1e", b"1.5e+"),
        *(b"NaN", b"-Infinity", b"-Inf", b"nul", b"1" * 5000, b"[" * 100_000, b"\xff\xfe", b'{"schema_version": 1}', b'{"schema_version": 4.0}'),
        *(b'{"schema_version": 4, "schema_version": true}', '{"é": "😀" 1}'.encode(), b'{\r\n"a": 1\r"b"}'),
    ],
    ids=lambda content: repr(content[:20]),
)  # fmt: skip
def test_manifests_that_are_something_else(jvm, folder, content):
    assert_manifests_alike(jvm, folder, content)


@needs_jdk
def test_a_bundle_for_another_backend(jvm, copy):
    data = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
    data["backends"]["executorch"] = data["backends"].pop("onnx")
    for graph in data["graphs"].values():
        graph["files"]["executorch"] = graph["files"].pop("onnx")
    (copy / "manifest.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError) as ours:
        choose_backend(contract.load(copy), "onnx")
    asked = {
        "open": {"python": sys.executable, "policy": POLICIES["3"]},
        "memory": {"context": 64, "margin": 0, "drafts": True},
    }
    for do, values in asked.items():
        with pytest.raises(Refused) as theirs:
            jvm.ask(do, bundle=str(copy), **values)
        assert str(theirs.value) == str(ours.value)


@needs_jdk
@pytest.mark.parametrize("damage", [("onnx/drafter.onnx", None), ("embeddings/drafter_head.bin", b"\0")])
def test_damaged_drafter_means_plain_decoding_for_the_same_reason(bundle_of, tmp_path, jvm, damage):
    bundle = Path(shutil.copytree(bundle_of(SHAPE), tmp_path / "bundle"))
    name, content = damage
    (bundle / name).unlink() if content is None else (bundle / name).write_bytes(content)
    both = Both(jvm, bundle, POLICIES["3"])
    assert both.opened["off_reason"] == both.pair.off_reason and name in both.pair.off_reason
    both.policy = POLICIES["plain"]
    both.session.policy = both.pair.policy
    both.generate([2, 40, 41], 6)
