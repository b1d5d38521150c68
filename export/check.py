"""Verify a bundle: hashes, graph contracts, pair rules, and row invariance measured by running it."""

import itertools
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from runtime_py import manifest as contract
from runtime_py.cache import KVCache
from runtime_py.cpus import default_threads
from runtime_py.embeddings import map_array
from runtime_py.files import check_hashes
from runtime_py.loading import load
from runtime_py.manifest import CHUNK_ROWS, Manifest, TensorSpec
from runtime_py.models import Target

from .graphs.layers import past_inputs

CONTEXT_TOKENS, MAX_BLOCK = 160, 17  # rows before the block, most rows in it
AGAIN = "export the bundle again"


def check_bundle(bundle: Path) -> None:
    """Print a line per thing verified; ValueError at the first that is wrong."""
    manifest = contract.load(bundle)
    print(
        f"manifest: schema {manifest.schema_version}, {manifest.name}, recipe {_recipes(manifest)}, KV in {manifest.kv.dtype}"
    )
    if manifest.warning:
        print(manifest.warning)
    check_hashes(bundle, manifest, manifest.files)
    print(f"hashes: {len(manifest.files)} files are as exported")
    for name, graph in manifest.graphs.items():
        if "onnx" in graph.files:
            _check_onnx(bundle, manifest, graph)
            print(
                f"{name}: {len(graph.inputs)} inputs and {len(graph.outputs)} outputs as in the manifest, weights in place"
            )
    _check_pair(manifest)
    _check_centroid_head(bundle, manifest)
    print("pair: graphs, tables and donors of target and drafter fit")
    for backend in manifest.backends:
        _check_run(bundle, manifest, backend)


def _recipes(manifest: Manifest) -> str:
    return ", ".join(f"{spec.quantization.title} ({name})" for name, spec in manifest.backends.items())


def _check_onnx(bundle: Path, manifest: Manifest, graph: contract.GraphSpec) -> None:
    """Declared inputs and outputs are the manifest's; every weight lies inside the one data file."""
    path, data = bundle / graph.files["onnx"], f"{graph.files['onnx']}.data"
    try:
        model = onnx.load(path, format="protobuf", load_external_data=False).graph
    except DecodeError as error:
        raise ValueError(f"{path}: no ONNX model ({error}); {AGAIN}") from None
    for values, specs in ((model.input, graph.inputs), (model.output, graph.outputs)):
        wanted = [f"{spec.name} {_told(spec)}" for spec in specs]
        for mine, other in itertools.zip_longest(map(_declared, values), wanted):
            if mine != other:
                raise ValueError(f"{path}: declares {mine}, the manifest says {other}; {AGAIN}")
    size = manifest.files[data].size_bytes if data in manifest.files else 0
    for weight in model.initializer:
        place = {entry.key: entry.value for entry in weight.external_data}
        end = int(place.get("offset", 0)) + int(place.get("length", 0))
        if place and (place["location"] != Path(data).name or end > size):
            raise ValueError(f"{path}: {weight.name} ends at byte {end} of {place['location']}, not in {data}; {AGAIN}")


def _declared(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    sizes = [size.dim_param or size.dim_value for size in tensor.shape.dim]
    kind = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    return f"{value.name} {'float32' if kind == 'float' else kind}{sizes}"


def _check_pair(manifest: Manifest) -> None:
    """Shapes on which the three graphs must agree for the host to join them."""
    target, drafter, kv = manifest.target, manifest.drafter, manifest.kv
    if strange := set(drafter.layer_types) - kv.donors.keys():
        raise ValueError(f"drafter: layer type {strange.pop()!r} has no donor, the target has {', '.join(kv.donors)}")
    layers = {layer.layer: layer for layer in kv.layers}
    floats = {
        ("drafter", "pair"): (1, 2 * target.hidden_size),
        ("drafter", "hidden"): (1, drafter.hidden_size),
        ("drafter", "state"): (1, target.hidden_size),
        ("cross_decoder", "logits"): ("R", target.vocab_size),
        ("cross_decoder", "hidden"): ("R", target.hidden_size),
    }
    past = {}
    for kind, donor in kv.donors.items():
        row = layers[donor].kv_heads, layers[donor].head_dim
        for graph in ("drafter", "cross_decoder"):
            past |= {(graph, spec.name): spec for spec in past_inputs(f"{{}}_{kind}", kind, *row, kv.dtype)}
        floats |= {("cross_decoder", f"tail_{w}_{kind}"): (kv.chunk_rows, *row) for w in "kv"}
    for layer in kv.layers:
        row = layer.kv_heads, layer.head_dim
        specs = past_inputs(f"past_{{}}.{layer.layer}", layer.type, *row, kv.dtype)
        past |= {("self_decoder", spec.name): spec for spec in specs}
        floats |= {("self_decoder", f"tail_{w}.{layer.layer}"): (kv.chunk_rows, *row) for w in "kv"}
    group = target.query_heads // max(1, kv.layers[0].kv_heads)
    floats["self_decoder", "mask_tail_full"] = "T" if group == 1 else f"{group}*T", kv.chunk_rows
    if drafter.centroid_head is None:
        floats["drafter", "logits"] = 1, target.vocab_size
    wanted = past | {(graph, name): TensorSpec(name, shape) for (graph, name), shape in floats.items()}
    for (graph, name), spec in wanted.items():
        specs = {spec.name: spec for spec in (*manifest.graphs[graph].inputs, *manifest.graphs[graph].outputs)}
        if specs.get(name) != spec:
            found = _told(specs[name]) if name in specs else "missing"
            raise ValueError(f"{graph}: {name} is {found}, the pair needs {_told(spec)}; {AGAIN}")


def _told(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _check_centroid_head(bundle: Path, manifest: Manifest) -> None:
    """What manifest.load cannot see: a row for every token, and every token in just one cluster."""
    if (head := manifest.drafter.centroid_head) is None:
        return
    vocab, rows = manifest.target.vocab_size, head.table.data.shape[0]
    if rows != vocab:
        raise ValueError(f"drafter.centroid_head.table: {rows} rows for a vocabulary of {vocab}; {AGAIN}")
    ids = np.sort(map_array(bundle, head.token_ordering), axis=None)
    if not np.array_equal(ids, np.arange(vocab)):
        raise ValueError(f"{bundle / head.token_ordering.file}: no permutation of 0..{vocab - 1}; {AGAIN}")


def _check_run(bundle: Path, manifest: Manifest, backend: str) -> None:
    """Load the bundle and hold its row invariance against what the manifest states."""
    pair = load(bundle, threads=default_threads(), backend=backend)
    if pair.off_reason:
        raise ValueError(f"drafter does not load: {pair.off_reason}")
    broken = _blocks_that_differ(pair.target)
    measured = (
        f"rows differ from rows alone at T = {', '.join(map(str, broken))}"
        if broken
        else "every row has the same bits alone and in blocks"
    )
    stated = manifest.backends[backend].quantization.row_invariant
    if stated and broken:
        raise ValueError(
            f"{bundle}: states row invariance, but on {backend} {measured}: drafted text may differ from plain text in "
            "near ties; export with another recipe"
        )
    promise = "promises" if stated else "does not promise"
    print(f"row invariance on {backend}: {measured} (which the manifest {promise})")


def _blocks_that_differ(target: Target) -> list[int]:
    """The T of 2..MAX_BLOCK at which logits, hidden or new KV of some row are not those of the row run alone.

    In the second chunk, or at the first one's end where the context is shorter: a block crosses no chunk's end.
    """
    random = np.random.default_rng(0)
    largest, context = min(MAX_BLOCK, target.max_context_tokens - 1), target.max_context_tokens
    fits = context >= CONTEXT_TOKENS + largest
    cache = target.new_cache(CONTEXT_TOKENS + largest if fits else min(context, CHUNK_ROWS))
    ids = random.integers(0, target.spec.vocab_size, cache.max_context_tokens).tolist()
    while len(ids) - cache.length > largest:
        target.append(cache, ids[cache.length : cache.length + min(cache.room, len(ids) - cache.length - largest)])
    block = ids[cache.length :]
    blocks = [_rows(target, cache, block[:rows]) for rows in range(2, largest + 1)]
    alone = []
    for token in block:
        alone += _rows(target, cache, [token])
        target.append(cache, [token])
    return [len(rows) for rows in blocks if rows != alone[: len(rows)]]


def _rows(target: Target, cache: KVCache, ids: list[int]) -> list[bytes]:
    """All that comes out of each row."""
    out = target.forward(cache, ids)
    parts = (out.logits, out.hidden, *out.new.k, *out.new.v)
    return [b"".join(part[row].tobytes() for part in parts) for row in range(len(ids))]
