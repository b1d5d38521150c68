"""Damaged bundles never end in a traceback: a manifest loads or is refused by name, a truncated file is one line and
exit code 2, and a damaged drafter means plain decoding with a warning."""

import copy
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime_py import manifest as contract
from runtime_py.__main__ import main

from .edits import edit_json, error_line
from .pairs import PairShape

SHAPE = PairShape(layers=4, period=2, shared=2, intermediate=64)
NUMBERS = (0, -1, 1 << 20, 1e308, 0.5, float("nan"), float("inf"), True)
HUGE = (1 << 63, 10**400)  # beyond an index, beyond a float
OTHERS = (None, "", "x", "../x", "/etc/passwd", "\x00", "\ud800", [], {}, [[]], {"": None}, "T", "4*T", "sliding")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def original(bundle_of) -> dict:
    return json.loads((bundle_of(SHAPE) / "manifest.json").read_text(encoding="utf-8"))


def places(node: object, path: tuple = ()) -> list[tuple]:
    """Every path into a JSON value; of a list the first and the last entry."""
    inner = node.items() if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    inner = inner[:1] + inner[1:][-1:] if isinstance(inner, list) else inner
    return [path] * bool(path) + [place for key, value in inner for place in places(value, (*path, key))]


def mutate(data: dict, place: tuple, action: str, value: object) -> None:
    """Change what lies at `place`; a place that an earlier mutation took away is left alone."""
    node, last = data, place[-1]
    try:
        for key in place[:-1]:
            node = node[key]
        before = node[last]
    except (KeyError, IndexError, TypeError):
        return
    if action == "drop":
        del node[last]
    elif action == "rename" and isinstance(node, dict):
        node[f"{last}_"] = node.pop(last)
    elif action == "repeat" and isinstance(node, list):
        node.append(copy.deepcopy(before))
    elif not isinstance(node, str):
        node[last] = value


def assert_loads_or_is_refused(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    try:
        contract.load(folder)
    except ValueError as error:
        assert str(error).startswith(f"{folder / 'manifest.json'}: ") and "\n" not in str(error), error


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_manifest(folder, original, data):
    mutated = copy.deepcopy(original)
    every = places(original)
    for _ in range(data.draw(st.integers(1, 3))):
        action = data.draw(st.sampled_from(["drop", "rename", "repeat", "replace", "replace"]))
        value = data.draw(st.sampled_from([*NUMBERS, *OTHERS]))
        mutate(mutated, data.draw(st.sampled_from(every)), action, value)
    assert_loads_or_is_refused(folder, json.dumps(mutated).encode("utf-8"))


def test_extreme_numbers(folder, original):
    """Every number of the manifest, one at a time."""
    for place in places(original):
        mutated = copy.deepcopy(original)
        before = original
        for key in place:
            before = before[key]
        if type(before) in (int, float):
            for value in (*NUMBERS, *HUGE):
                mutate(mutated, place, "replace", value)
                assert_loads_or_is_refused(folder, json.dumps(mutated).encode("utf-8"))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_text(folder, original, data):
    content = bytearray(json.dumps(original, indent=1).encode("utf-8"))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    assert_loads_or_is_refused(folder, bytes(content))


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b"1" * 5000, b"[" * 100_000, b'{"schema_version": 1}', b"\xff\xfe"]
)
def test_no_manifest_at_all(folder, content):
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"manifest\.json: [^\n]*$"):
        contract.load(folder)


# Through the command line.

ASK = ["--prompt-ids", "2,40,41", "--max-new-tokens", "4", "--threads", "1"]


@pytest.fixture(scope="module")
def bundle(bundle_of, tmp_path_factory) -> Path:
    return Path(shutil.copytree(bundle_of(SHAPE), tmp_path_factory.mktemp("truncated") / "bundle"))


@pytest.fixture
def ask_with(bundle, original, capsys):
    """changes of the manifest -> exit code and stderr's lines of a generation."""

    def ask(changes: dict, *options: str) -> tuple[int, list[str]]:
        edit_json(bundle / "manifest.json", changes)
        capsys.readouterr()
        return main(["generate", str(bundle), *ASK, *options]), capsys.readouterr().err.splitlines()

    yield ask
    (bundle / "manifest.json").write_text(json.dumps(original), encoding="utf-8")


@pytest.mark.parametrize(
    "place",
    [
        "kv/chunk_rows",
        "kv/layers/0/kv_heads",
        "target/query_heads",
        "target/per_layer_table/block",
        "target/per_layer_table/zero_point",
        "backends/onnx/loaded_bytes/drafter",
        "drafter/position_offset",
        "drafter/centroid_head/table/zero_point",
    ],
)
def test_a_number_that_no_double_holds_is_refused_by_name(ask_with, place):
    code, lines = ask_with({place: 10**400})
    assert code == 2 and len(lines) == 1 and place.rpartition("/")[2] in lines[0], lines


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("target/per_layer_table/scales/dtype", "float16", "target.per_layer_table.scales: dtype 'float16' is none of"),
        ("backends/onnx/token_table/scales/dtype", "int8", "backends.onnx.token_table.scales: dtype 'int8' is none of"),
        ("backends/onnx/token_table/zero_point", 256, "backends.onnx.token_table.zero_point: 256 is outside 0..255"),
        ("drafter/centroid_head/table/zero_point", -129, "zero_point: -129 is outside -128..127"),
        ("drafter/centroid_head/token_ordering/dtype", "float32", "token_ordering: dtype 'float32' is not int32"),
        ("drafter/centroid_head/centroids/dtype", "int32", "centroids: dtype 'int32' is not float32"),
    ],
)
def test_bytes_are_not_read_as_what_they_are_not(ask_with, place, value, told):
    """Types of the right size: nothing but their name tells."""
    code, lines = ask_with({place: value})
    assert code == 2 and len(lines) == 1 and told in lines[0], lines


def test_a_layer_without_kv_heads_is_refused_by_name(ask_with):
    code, lines = ask_with({"kv/layers/0/kv_heads": 0})
    assert code == 2 and "kv.layers[0].kv_heads: must be at least 1, got 0" in lines[0] and len(lines) == 1, lines


def test_a_drafter_without_any_head_is_refused_by_name(ask_with):
    code, lines = ask_with({"drafter/centroid_head": None})
    assert code == 2 and "drafter.centroid_head: none, and the drafter's graph gives no logits" in lines[0], lines


def test_scales_of_a_block_longer_than_a_row_take_no_memory(ask_with):
    assert ask_with({"target/per_layer_table/block": 1 << 50, "backends/onnx/token_table/block": 1 << 50})[0] == 0


def test_memory_that_runs_out_is_one_line(ask_with):
    code, lines = ask_with({"kv/window": 1 << 46}, "--force")
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: out of memory (") and "--context" in lines[0]


@pytest.fixture(scope="module")
def sizes(bundle) -> list[tuple[str, int]]:
    return [(name, spec.size_bytes) for name, spec in contract.load(bundle).files.items()]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_truncated_files(bundle, sizes, share, capsys):
    for name, size in sizes:
        path, whole = bundle / name, (bundle / name).read_bytes()
        path.write_bytes(whole[: int(size * share)])
        if "drafter" in name:
            assert main(["generate", str(bundle), *ASK]) == 0
            first = capsys.readouterr().err.splitlines()[0]
            assert first.startswith("warning: drafting is off: ") and str(path) in first, first
        else:
            assert str(path) in error_line(main, ["generate", bundle, *ASK], capsys)
        assert str(path) in error_line(main, ["info", bundle], capsys)
        path.write_bytes(whole)
    assert main(["generate", str(bundle), *ASK]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("position", [0.0, 0.01, 0.5, 0.99])
def test_flipped_bytes_of_the_drafter(bundle, sizes, position, capsys):
    """The size is right, only the hash tells."""
    for name, size in sizes:
        if "drafter" in name:
            path, whole = bundle / name, (bundle / name).read_bytes()
            damaged = bytearray(whole)
            damaged[int(size * position)] ^= 0x40
            path.write_bytes(damaged)
            assert main(["generate", str(bundle), *ASK]) == 0
            assert "warning: drafting is off" in capsys.readouterr().err
            path.write_bytes(whole)
