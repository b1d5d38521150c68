"""KV rows in float16 and int8: how a row is made, files == eager on the same rows, drafted text == plain text, and what the
narrower rows cost. Seeded mistakes with scales must make a check fail."""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from executorch.exir._serialize._program import deserialize_pte_binary
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from export.__main__ import main as export_main
from export.graphs.layers import Linear
from runtime_py import cache, kv_rows
from runtime_py import manifest as contract
from runtime_py.__main__ import main
from runtime_py.graph_onnx import OnnxGraph
from runtime_py.manifest import CHUNK_ROWS, KV_PARTS, GraphSpec
from runtime_py.session import Session

from . import tolerances
from .conftest import BACKENDS
from .edits import edit_json, error_line
from .reference import (
    Models,
    acceptance,
    eager_graphs,
    eager_models,
    file_models,
    load_tiny,
    prompts_of,
)
from .test_parity import (
    DENSE_ODD,
    NEW_TOKENS,
    check_rows_alone_and_in_blocks,
    compare_with_plain_ids,
    float_activations,
    random_ids,
    rounded_linear,
    rows_to,
    run_both,
)
from .test_session import asked

Array = np.ndarray
ROOT = Path(__file__).parent.parent
NARROW = ("float16", "int8")
K = 3  # drafts
backends = pytest.mark.parametrize("backend", BACKENDS)
narrow = pytest.mark.parametrize("dtype", NARROW)
cases = pytest.mark.parametrize(
    ("shape", "dtype"),
    [("tiny", "float16"), ("tiny", "int8"), (DENSE_ODD, "int8")],
    ids=["tiny-float16", "tiny-int8", "odd-int8"],
)

# How a row is made.

rows_of_floats = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 9)),
    elements=st.floats(-1e4, 1e4, width=32),
)


@settings(max_examples=300, deadline=None)
@given(rows=rows_of_floats)
def test_int8_rows_are_the_nearest_to_a_scale_of_the_row_and_head_alone(rows):
    values, scale = kv_rows.quantize(rows)
    assert (values.dtype, scale.dtype, scale.shape) == (np.int8, np.float32, rows.shape[:2])
    for t, head in np.ndindex(*rows.shape[:2]):
        row, exact = rows[t, head].astype(np.float64), np.float64(scale[t, head])
        assert exact == np.float32(np.abs(row).max()) / np.float32(127)
        wanted = [round(float(np.float32(x) / scale[t, head])) if exact else 0 for x in rows[t, head]]  # halves to even
        assert values[t, head].tolist() == [max(-127, min(127, x)) for x in wanted]
        if exact > 1e-30:
            assert np.abs(values[t, head] * exact - row).max() <= exact * 0.501


@settings(max_examples=200, deadline=None)
@given(k=rows_of_floats, dtype=st.sampled_from(tuple(KV_PARTS)))
def test_a_row_is_made_of_itself_alone(k, dtype):
    assert made_alone(lambda k, v: kv_rows.encode(k, v, dtype), k, -k)


def made_alone(encode: Callable, k: Array, v: Array) -> bool:
    """Whether each row has the same bits alone and in the block."""
    block = encode(k, v)
    alone = [encode(k[i : i + 1], v[i : i + 1]) for i in range(len(k))]
    return all(part.tobytes() == b"".join(row[j].tobytes() for row in alone) for j, part in enumerate(block))


def test_halves_go_to_the_even_number_and_rows_of_zeros_stay_zeros():
    values, scale = kv_rows.quantize(np.array([[[127, 0.5, 1.5, 2.5, -0.5, -1.5]], [[0] * 6]], np.float32))
    assert values.tolist() == [[[127, 0, 2, 2, 0, -2]], [[0] * 6]]
    assert scale.tolist() == [[1], [0]]


# Files against eager graphs.


def feeds_of(spec: GraphSpec, rows: int, past: int, window: int) -> dict[str, Array]:
    """Random inputs of every type: T = R = rows, P_full = past, P_sliding the same up to the window."""
    random, sizes = (
        np.random.default_rng([rows, past]),
        {"T": rows, "R": rows, "P_full": past, "P_sliding": min(past, window)},
    )
    feeds = {}
    for put in spec.inputs:
        parts = (str(size).rpartition("*") for size in put.shape)
        shape = [int(factor or 1) * (sizes[symbol] if symbol in sizes else int(symbol)) for factor, _, symbol in parts]
        if put.dtype == "int8":
            feeds[put.name] = random.integers(-127, 128, shape).astype(np.int8)
        elif "_scale" in put.name:
            feeds[put.name] = random.uniform(0.002, 0.02, shape).astype(np.float32)
        else:
            feeds[put.name] = random.standard_normal(shape).astype(put.dtype)
        if put.name.startswith(("cos", "sin")):
            feeds[put.name][:, shape[1] // 2 :] = feeds[put.name][:, : shape[1] // 2]  # both halves equal
    return feeds


@pytest.fixture
def same_activations(bundle_of, pair_of, tmp_path, monkeypatch):
    """(shape, dtype, backend) -> int8 files and eager graphs that treat activations alike."""

    def make(shape, dtype: str, backend: str) -> tuple[Models, dict]:
        bundle = bundle_of(shape, "int8", backend, dtype)
        if backend == "onnx":
            models = float_activations(bundle, tmp_path)
        else:
            models = file_models(bundle)
            monkeypatch.setattr(Linear, "forward", rounded_linear)
        return models, eager_graphs(pair_of(shape), "int8", backend, dtype)

    return make


@cases
@backends
def test_file_equals_eager_at_any_size(same_activations, shape, dtype, backend):
    models, eager = same_activations(shape, dtype, backend)
    window = models.manifest.kv.window
    for name, spec in models.manifest.graphs.items():
        for rows, past in ((1, 1), (2, window - 1), (K + 1, window), (1, 3 * window), (K + 1, 3 * window)):
            feeds = feeds_of(spec, rows, past, window)
            ours, theirs = models.graphs[name](feeds), eager[name](feeds)
            for put, want in theirs.items():
                assert deviation(ours[put], want) <= tolerance(backend, name), (put, rows, past)


@cases
@backends
def test_file_equals_eager_on_rows_of_the_cache(same_activations, shape, dtype, backend):
    """Prefill, verify and drafts across windows and chunks."""
    for name, graph in run_both(*same_activations(shape, dtype, backend)).items():
        assert max(graph.worst_in_deviations.values()) <= tolerance(backend, name), graph.worst_in_deviations


def deviation(ours: Array, want: Array) -> float:
    """Root mean square of the difference in standard deviations."""
    return float(np.sqrt(((ours - want) ** 2).mean()) / want.std())


def tolerance(backend: str, graph: str) -> float:
    return tolerances.FILE if backend == "onnx" else tolerances.ROUNDED[graph]


@cases
@backends
def test_a_row_has_the_same_bits_alone_and_in_blocks(bundle_of, shape, dtype, backend):
    check_rows_alone_and_in_blocks(file_models(bundle_of(shape, "int8", backend, dtype)))


@narrow
@backends
def test_drafted_ids_equal_plain_ids(bundle_of, dtype, backend):
    assert compare_with_plain_ids(file_models(bundle_of("tiny", "int8", backend, dtype)), 3) >= 1000


@narrow
@backends
def test_as_many_drafts_are_accepted_as_with_float32_rows(bundle_of, dtype, backend):
    """Held-out prompts, K = 3; per place in the block."""
    places = []
    for kv in ("float32", dtype):
        models = file_models(bundle_of("tiny", "int8", backend, kv))
        rounds = [
            entry for prompt in prompts_of(models.bundle, 40) for entry in models.generate(prompt, NEW_TOKENS, K)[1]
        ]
        places.append(acceptance(rounds).places)
    lost = [wide - ours for wide, ours in zip(*places, strict=True)]
    assert max(lost) <= tolerances.ACCEPTANCE_LOST_TO_KV, places


@pytest.mark.parametrize("dtype", NARROW)
def test_a_pte_is_one_delegate_and_nothing_else(bundle_of, dtype):
    for path in sorted((bundle_of("tiny", "int8", "executorch", dtype) / "executorch").glob("*.pte")):
        (plan,) = deserialize_pte_binary(path.read_bytes()).program.execution_plan
        assert [delegate.id for delegate in plan.delegates] == ["XnnpackBackend"], path
        assert plan.operators == [], path


@narrow
def test_without_a_compiler_the_text_is_the_same(bundle_of, dtype, tmp_path):
    """Past the end of a chunk, by ExecuTorch's Python package."""
    command = [sys.executable, "-m", "runtime_py", "generate", str(bundle_of("tiny", "int8", "executorch", dtype))]
    command += ["--prompt", "ROMEO:", "--max-new-tokens", "140", "--draft-tokens", "3", "--temperature", "0"]
    none = {**os.environ, "CXX": "", "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "home")}
    done = [subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True) for env in (os.environ, none)]
    assert [one.returncode for one in done] == [0, 0], done[1].stderr
    assert done[0].stdout == done[1].stdout != ""
    assert "Python package is used" in done[1].stderr


LONG = 400_000  # past rows
MEASURE = f"""
import resource, sys
from pathlib import Path
import numpy as np
from runtime_py import manifest as contract
from runtime_py.graph_onnx import OnnxGraph
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
bundle = Path(sys.argv[1])
sizes = dict(T=1, R=1, P_sliding=32, P_full={LONG}) | {{"4*T": 4, "4*R": 4}}
calls = []
for spec in contract.load(bundle).graphs.values():
    feeds = {{put.name: np.ones([sizes.get(size, size) for size in put.shape], put.dtype) for put in spec.inputs}}
    calls.append((OnnxGraph(bundle / spec.files["onnx"], spec, 1), feeds))
before = peak()
for graph, feeds in calls:
    graph(feeds)
print(peak() - before)
"""


@narrow
def test_all_graphs_cast_in_the_same_memory(bundle_of, dtype):
    """Keys and values of one full layer, and what else a call takes; each graph for itself would take three times that."""
    command = [sys.executable, "-c", MEASURE, str(bundle_of("tiny", "int8", "onnx", dtype))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1.5 * 2 * LONG * 64 * np.dtype("float32").itemsize


# Mistakes with scales.


@pytest.fixture(scope="module")
def eager_pair(pair_of, tmp_path_factory) -> tuple[Models, Models]:
    """The odd pair, which has two kv heads, with int8 and with float32 rows."""
    folder, pair = tmp_path_factory.mktemp("kv"), pair_of(DENSE_ODD)
    return tuple(eager_models(pair, folder / dtype, kv_dtype=dtype) for dtype in ("int8", "float32"))


def distance(models: tuple[Models, Models]) -> float:
    """Largest deviation of the target's logits and the drafter's state with int8 rows from those with float32 rows: blocks
    past the window, across an end of a chunk and past three."""
    ids, worst = iter(random_ids(models[0], 1000)), 0.0
    caches = [one.new_cache() for one in models]
    for rows, accepted in [
        *rows_to(CHUNK_ROWS + 20),
        *[(4, 2), (1, 1)] * 40,
        *rows_to(CHUNK_ROWS - 12),
        (8, 8),
        *[(4, 3)] * 8,
    ]:
        rows = min(rows, caches[0].room)
        block = [next(ids) for _ in range(rows)]
        outputs = [one.target.forward(each, block) for one, each in zip(models, caches, strict=True)]
        worst = max(worst, deviation(*(output.logits for output in outputs)))
        for each, output in zip(caches, outputs, strict=True):
            each.commit(output.new.k, output.new.v, min(rows, accepted))
        states = []
        for one, each in zip(models, caches, strict=True):
            one.drafter.rounds.clear()
            one.drafter.draft(each, 5, outputs[1].hidden[0], 1)
            states.append(one.drafter.rounds[0].steps[0].state)
        worst = max(worst, deviation(*states))
    return worst


def with_int8(make: Callable[[Array, Array], tuple[Array, ...]]) -> Callable:
    """`encode` that makes int8 rows in another way."""
    return lambda k, v, dtype: make(k, v) if dtype == "int8" else kv_rows.encode(k, v, dtype)


@with_int8
def head_of_another(k: Array, v: Array) -> tuple[Array, ...]:
    k8, v8, k_scale, v_scale = kv_rows.encode(k, v, "int8")
    return k8, v8, k_scale[:, ::-1], v_scale[:, ::-1]


@with_int8
def scale_of_k_for_v(k: Array, v: Array) -> tuple[Array, ...]:
    k8, v8, k_scale, _ = kv_rows.encode(k, v, "int8")
    return k8, v8, k_scale, k_scale


@with_int8
def scale_of_the_block(k: Array, v: Array) -> tuple[Array, ...]:
    """One scale for a head of all rows that are committed at once."""
    scales = [np.abs(rows).max((0, 2), initial=1e-9) / np.float32(127) for rows in (k, v)]
    scales = [np.broadcast_to(scale, k.shape[:2]).astype(np.float32) for scale in scales]
    k8, v8 = (np.rint(rows / scale[..., None]).astype(np.int8) for rows, scale in zip((k, v), scales, strict=True))
    return k8, v8, *scales


def stale_scales(ring: tuple[Array, ...], rows: tuple[Array, ...], position: int) -> None:
    """A ring whose scales stay what they were when it wraps."""
    count = 2 if len(ring) == 4 and position >= len(ring[0]) else len(ring)
    write_ring(ring[:count], rows[:count], position)


write_ring = cache._write_ring
MUTATIONS = {
    "scale of the other head": ("encode", head_of_another),
    "scale of k for v": ("encode", scale_of_k_for_v),
    "one scale for a block": ("encode", scale_of_the_block),
    "stale scales in a ring": ("_write_ring", stale_scales),
}


def passes(models: tuple[Models, Models]) -> bool:
    random = np.random.default_rng(0)
    k, v = (random.standard_normal((5, 2, 8)).astype(np.float32) for _ in "kv")
    return distance(models) <= tolerances.INT8_ROWS and made_alone(lambda k, v: cache.encode(k, v, "int8"), k, v)


def test_int8_rows_are_near_float32_rows(eager_pair):
    assert passes(eager_pair)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mistake_with_scales_is_caught(eager_pair, name, monkeypatch):
    monkeypatch.setattr(cache, *MUTATIONS[name])
    assert not passes(eager_pair)


# Sessions.


@narrow
@backends
def test_rewound_text_is_the_same_text(bundle_of, dtype, backend):
    """A closed chunk is not opened again: what stood in it is run again from its beginning, and counted."""
    session = Session(load_tiny(bundle_of("tiny", "int8", backend, dtype), draft_tokens=K))
    whole = session.generate("ROMEO:", asked(300))
    text = [*whole.prompt_ids, *whole.token_ids]
    for length, again, reused in (
        (290, 0, 289),
        (257, 0, 256),
        (250, 122, 128),
        (140, 12, 128),
        (128, 0, 0),
        (20, 20, 0),
    ):
        assert session.rewind(length) == again
        reply = session.generate(session.ids, asked(len(text) - length))
        assert session.ids == text
        assert reply.reused_tokens == reused  # the last token is always run, so that 128 opens a closed chunk


@narrow
def test_saved_session_goes_on_where_it_was_but_on_rows_of_another_type(bundle_of, dtype, tmp_path):
    pair = load_tiny(bundle_of("tiny", "int8", "onnx", dtype), draft_tokens=0)
    session, other, path = Session(pair), Session(pair), tmp_path / "a.safetensors"
    session.generate("ROMEO:", asked(200))
    session.save(path)
    other.restore(path)
    prompt = [*session.ids, 30, 31]
    mine, theirs = (each.generate(prompt, asked(40)) for each in (session, other))
    assert mine.token_ids == theirs.token_ids
    assert mine.reused_tokens == theirs.reused_tokens == len(mine.prompt_ids) - 3
    wide = Session(load_tiny(bundle_of("tiny"), draft_tokens=0))
    with pytest.raises(ValueError, match=f"kv is {dtype}, not float32; start a new session"):
        wide.restore(path)
    assert wide.ids == []


# Command line.


@narrow
def test_info_and_check_tell_the_type(bundle_of, dtype, capsys):
    bundle = bundle_of("tiny", "int8", "onnx", dtype)
    assert main(["info", str(bundle)]) == 0
    assert f"KV in {dtype}: " in capsys.readouterr().out
    assert export_main(["check", str(bundle)]) == 0
    told = capsys.readouterr().out
    assert f"KV in {dtype}" in told and "row invariance on onnx: every row has the same bits" in told


def test_an_unknown_type_is_refused_before_anything_is_written(tmp_path, capsys):
    line = error_line(export_main, ["tiny", "--kv", "int4", "--out", tmp_path / "bundle"], capsys)
    assert "--kv: invalid choice: 'int4'" in line and "fp32" in line
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"kv/dtype": "int4"}, "kv: dtype 'int4' is none of float32, float16, int8"),
        ({"kv/dtype": "float16"}, "is int8['P_sliding', 1, 32], the pair needs float16['P_sliding', 1, 32]"),
        ({"graphs/drafter/inputs/5/dtype": "float64"}, "k_sliding: dtype 'float64' is none of"),
        (
            {"graphs/drafter/inputs/5/dtype": "float16"},
            "k_sliding int8['P_sliding', 1, 32], the manifest says k_sliding float16",
        ),
    ],
)
def test_check_refuses_a_manifest_of_another_type(bundle_of, tmp_path, changes, part, capsys):
    bundle = Path(shutil.copytree(bundle_of("tiny", "int8", "onnx", "int8"), tmp_path / "bundle"))
    edit_json(bundle / "manifest.json", changes)
    assert part in error_line(export_main, ["check", bundle], capsys)


def test_a_file_of_another_type_than_the_manifest_says_does_not_load(bundle_of):
    bundle = bundle_of("tiny", "int8", "onnx", "int8")
    spec = contract.load(bundle).graphs["drafter"]
    other = tuple(dataclasses.replace(put, dtype="float32") for put in spec.inputs)
    with pytest.raises(ValueError, match="not those of the manifest"):
        OnnxGraph(bundle / spec.files["onnx"], dataclasses.replace(spec, inputs=other), 1)


def test_default_folder_names_the_type(monkeypatch):
    from export import package

    asked_for = []

    def stop(*arguments):
        asked_for.append(arguments)
        raise ValueError("stop")

    monkeypatch.setattr(package, "export_package", stop)
    for options in ([], ["--kv", "int8"]):
        assert export_main(["tiny", *options]) == 2
    assert [(str(call[4]), call[-2]) for call in asked_for] == [
        ("build/tiny-int8", "float32"),
        ("build/tiny-int8-kv-int8", "int8"),
    ]
