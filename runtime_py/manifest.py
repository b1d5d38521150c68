"""The contract between exporter and runtimes: what manifest.json holds, as frozen records. Standard library only.

A graph's inputs and outputs are data (`GraphSpec`), without a batch axis. All are float32 but past rows, which have the
cache's dtype. A size in a shape is an integer or one of these symbols, optionally with a factor in front ("4*T"):

    T           rows run in one call, 1..chunk_rows
    R           rows whose logits are asked for, 1..T
    P_sliding   past rows of a sliding layer, 1..window (slot = position mod window)
    P_full      past rows of a full layer, 1..context

The past are closed chunks of chunk_rows positions, but the drafter's, which are all committed rows.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

from .strict_json import decode

SCHEMA_VERSION = 4
MANIFEST_NAME = "manifest.json"
RANDOM_WEIGHTS = "random weights"  # source of a checkpoint that is none: made for measuring
GRAPHS = ("self_decoder", "cross_decoder", "drafter")
SLIDING, FULL = "sliding", "full"
CHUNK_ROWS = 128  # positions of a chunk: the most tokens of one call, and the rows of the graphs' tail inputs
DTYPES = {"int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4}  # bytes per element
KV_PARTS = {  # dtype of committed rows -> what they are: k, v [rows, kv, D]; float32 scales [rows, kv] of int8
    "float32": ("k", "v"),
    "float16": ("k", "v"),
    "int8": ("k", "v", "k_scale", "v_scale"),
}
SCALE_DTYPES = ("bfloat16", "float32")
TABLE_DTYPES = {4: ("uint8",), 8: ("int8", "uint8"), 32: ("float32",)}  # bits of a table's values -> dtypes of its data


@dataclass(frozen=True)
class TensorSpec:
    """A graph input or output. shape: sizes as in the module's docstring; dtype: a key of KV_PARTS."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class GraphSpec:
    """One graph. files: backend name -> path in the bundle; inputs and outputs in calling order."""

    files: dict[str, str]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class FileSpec:
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class ArraySpec:
    """A C-contiguous array inside a file of the bundle; dtype is a key of DTYPES."""

    file: str
    offset_bytes: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return DTYPES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class TableSpec:
    """A matrix of row-quantized vectors: row r = (values[r] - zero_point) * scales[r, column // block] * multiplier.

    bits: 32 (data float32, no scales), 8 (int8 or uint8) or 4 (uint8, two values a byte, low nibble first). data
    [rows, stored] may be padded on the right to whole bytes or blocks.
    """

    data: ArraySpec
    scales: ArraySpec | None
    bits: int
    zero_point: int
    block: int
    columns: int
    multiplier: float


@dataclass(frozen=True)
class KVLayerSpec:
    """A target layer that owns keys and values: k and v rows are [kv_heads, head_dim]. type: "sliding" or "full"."""

    layer: int
    type: str
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class KVSpec:
    """layers in the order of the self_decoder's past_k.*; donors: type -> the layer whose rows the others read.

    chunk_rows: no call crosses a multiple of it, so that a token's keys stand at the same places alone and in a block.
    dtype: of committed rows; int8 is symmetric with a scale per (row, kv head), for k and for v.
    """

    window: int
    chunk_rows: int
    layers: tuple[KVLayerSpec, ...]
    donors: dict[str, int]
    dtype: str = "float32"

    def row_bytes(self, layer: KVLayerSpec) -> int:
        """Of one committed row."""
        scale = DTYPES["float32"] if self.dtype == "int8" else 0
        return 2 * layer.kv_heads * (layer.head_dim * DTYPES[self.dtype] + scale)


@dataclass(frozen=True)
class TargetSpec:
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_own_kv_layers: int  # layers 0 .. n-1 write the cache, the others read the donors'
    query_heads: int
    per_layer_input_size: int
    max_context_tokens: int  # checkpoint field max_position_embeddings
    inv_freq: dict[str, tuple[float, ...]]  # layer type -> rotary frequencies, [head_dim / 2]
    per_layer_table: TableSpec


@dataclass(frozen=True)
class CentroidHeadSpec:
    """The drafter's output head, run by the host: the best top_k of C centroids, then V/C rows of each.

    table [V, h] lies in cluster order: row j is the embedding of token token_ordering.ravel()[j].
    """

    table: TableSpec
    centroids: ArraySpec  # float32 [C, h]
    token_ordering: ArraySpec  # int32 [C, V / C], token ids
    top_k: int


@dataclass(frozen=True)
class DrafterSpec:
    """position_offset: the draft's constant position is N + position_offset, N counting the pending token."""

    hidden_size: int
    query_heads: int
    layer_types: tuple[str, ...]
    inv_freq: dict[str, tuple[float, ...]]
    num_draft_tokens: int  # generation_config num_assistant_tokens
    schedule: str  # generation_config num_assistant_tokens_schedule
    position_offset: int
    centroid_head: CentroidHeadSpec | None  # None: dense head, the graph has an output `logits` [1, V]


@dataclass(frozen=True)
class TokensSpec:
    """Ids as the checkpoint has them; any id of eos ends a text. special: name -> text of the tokens that a chat
    template may write (bos_token, ...)."""

    bos: int
    pad: int
    eos: tuple[int, ...]
    special: dict[str, str]


@dataclass(frozen=True)
class ChatSpec:
    """The chat template without jinja: what stands before, between and after the texts of a conversation of questions and
    answers. start: before the first question, or system_start and system_end around a system text (null: there can be
    none); prompt: after the last question. stripped: roles whose texts lose the white space around them."""

    start: str
    system_start: str | None
    system_end: str | None
    user_end: str
    answer_end: str
    prompt: str
    stripped: tuple[str, ...]


@dataclass(frozen=True)
class SamplingSpec:
    """Defaults of the checkpoint's generation_config."""

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float


@dataclass(frozen=True)
class QuantSpecSummary:
    """recipe as on the command line; row_invariant: every row has the same bits whatever rows are run with it. Relative
    errors are ||w - dequantized|| / ||w||; the per-layer table's is told beside the worst, for its bits are an option."""

    recipe: str
    row_invariant: bool
    quantized_share: float  # of the bytes of all checkpoint tensors used
    worst_tensor: str
    worst_relative_error: float
    per_layer_bits: int
    per_layer_relative_error: float

    @property
    def title(self) -> str:
        """The recipe, with what was chosen beside it."""
        return f"{self.recipe}, ple-bits 4" if self.per_layer_bits == 4 else self.recipe


@dataclass(frozen=True)
class BackendSpec:
    """What differs from backend to backend. max_context_tokens: the most rows that its graphs take; token_table: with a
    tied head the rows of its own cross_decoder file; weights_bytes: of its graphs' files; loaded_bytes: graph -> its weights
    in memory."""

    max_context_tokens: int
    token_table: TableSpec
    quantization: QuantSpecSummary
    weights_bytes: int
    loaded_bytes: dict[str, int]


@dataclass(frozen=True)
class MemorySpec:
    """Estimate of the resident bytes while generating, without the weights of the graphs."""

    tables_bytes: int  # mapped, only touched rows become resident
    kv_sliding_bytes: int  # whole, constant
    kv_full_bytes_per_token: int


@dataclass(frozen=True)
class CheckpointSpec:
    """Where the weights came from. source: folder name, hub id or RANDOM_WEIGHTS; revision: commit hash
    of a hub id, seed of random weights, else None."""

    source: str
    revision: str | None
    dtype: str
    files: dict[str, str]  # name -> sha256


@dataclass(frozen=True)
class Manifest:
    schema_version: int
    name: str
    target: TargetSpec
    drafter: DrafterSpec
    kv: KVSpec
    graphs: dict[str, GraphSpec]
    backends: dict[str, BackendSpec]
    tokens: TokensSpec
    chat: ChatSpec | None  # None: no template, or one that is not made of such pieces
    sampling: SamplingSpec
    memory: MemorySpec
    checkpoints: dict[str, CheckpointSpec]  # "target", "drafter"
    versions: dict[str, str]  # tool -> version
    files: dict[str, FileSpec]  # every other file of the bundle

    @property
    def warning(self) -> str | None:
        """What everyone who runs the bundle must know."""
        random = any(spec.source == RANDOM_WEIGHTS for spec in self.checkpoints.values())
        return "random weights: text means nothing" if random else None


def to_json(manifest: Manifest) -> str:
    return json.dumps(dataclasses.asdict(manifest), indent=1, ensure_ascii=False) + "\n"


def load(bundle: Path) -> Manifest:
    """Read and check bundle/manifest.json. ValueError names the file and the field that is wrong."""
    path = Path(bundle) / MANIFEST_NAME
    if Path(bundle).is_file():
        raise ValueError(f"{bundle}: is a file; give the folder that an export wrote")
    if not Path(bundle).is_dir():
        raise ValueError(
            f"{bundle}: no {MANIFEST_NAME}: no such folder; give the one that an export wrote, or export it again"
        )
    if not path.is_file():
        raise ValueError(f"{bundle}: no {MANIFEST_NAME}: not a bundle, or its export did not finish; export it again")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"schema_version is {version!r}, this runtime reads {SCHEMA_VERSION}; export the bundle again"
            )
        manifest = decode(Manifest, data)
        _validate(manifest)
    except (ValueError, OverflowError, RecursionError) as error:  # json and unicode errors are ValueErrors
        raise ValueError(f"{path}: {error}") from None
    return manifest


def _validate(manifest: Manifest) -> None:
    """What the types cannot say: names that must exist, paths that must stay inside the bundle, sizes that agree."""
    if tuple(sorted(manifest.graphs)) != tuple(sorted(GRAPHS)):
        raise ValueError(f"graphs: expected {', '.join(GRAPHS)}, got {', '.join(sorted(manifest.graphs)) or 'none'}")
    for name in manifest.files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"files: {name!r} leads out of the bundle")
    _require_file(manifest, "tokenizer.json", "text")
    for graph, spec in manifest.graphs.items():
        for path in spec.files.values():
            _require_file(manifest, path, f"graphs.{graph}.files")
    for where, array in _arrays(manifest):
        _validate_array(manifest, array, where)
    if not manifest.backends:
        raise ValueError("backends: none; the bundle cannot run")
    for name, backend in manifest.backends.items():
        _validate_table(backend.token_table, manifest.target.hidden_size, f"backends.{name}.token_table")
        if missing := [graph for graph, spec in manifest.graphs.items() if name not in spec.files]:
            raise ValueError(f"backends.{name}: graph {missing[0]} has no file for it")
        if backend.loaded_bytes.keys() != manifest.graphs.keys() or min(backend.loaded_bytes.values()) < 0:
            raise ValueError(f"backends.{name}.loaded_bytes: expected bytes of {', '.join(GRAPHS)}")
    width = manifest.target.num_layers * manifest.target.per_layer_input_size
    _validate_table(manifest.target.per_layer_table, width, "target.per_layer_table")
    _validate_kv(manifest)
    _validate_numbers(manifest)


def _require_file(manifest: Manifest, name: str, where: str) -> None:
    if name not in manifest.files:
        raise ValueError(f"{where}: {name!r} is not listed in files")


def _tables(manifest: Manifest) -> list[tuple[str, TableSpec]]:
    tables = [(f"backends.{name}.token_table", backend.token_table) for name, backend in manifest.backends.items()]
    tables.append(("target.per_layer_table", manifest.target.per_layer_table))
    if head := manifest.drafter.centroid_head:
        tables.append(("drafter.centroid_head.table", head.table))
    return tables


def _arrays(manifest: Manifest) -> list[tuple[str, ArraySpec]]:
    arrays = []
    for where, table in _tables(manifest):
        arrays += [(f"{where}.data", table.data)] + ([(f"{where}.scales", table.scales)] if table.scales else [])
    if head := manifest.drafter.centroid_head:
        arrays += [("drafter.centroid_head.centroids", head.centroids)]
        arrays += [("drafter.centroid_head.token_ordering", head.token_ordering)]
    return arrays


def _validate_array(manifest: Manifest, array: ArraySpec, where: str) -> None:
    _require_file(manifest, array.file, where)
    if array.dtype not in DTYPES:
        raise ValueError(f"{where}: dtype {array.dtype!r} is none of {', '.join(DTYPES)}")
    if len(array.shape) != 2 or min(array.shape) < 1 or array.offset_bytes < 0:
        raise ValueError(f"{where}: shape {array.shape} at offset {array.offset_bytes} is no matrix in a file")
    end, size = array.offset_bytes + array.size_bytes, manifest.files[array.file].size_bytes
    if end > size:
        raise ValueError(f"{where}: ends at byte {end}, {array.file} has {size}")


def _validate_table(table: TableSpec, columns: int, where: str) -> None:
    if table.data.dtype not in TABLE_DTYPES.get(table.bits, ()):
        raise ValueError(f"{where}: {table.bits} bits and dtype {table.data.dtype} do not go together")
    if table.scales and table.scales.dtype not in SCALE_DTYPES:
        raise ValueError(f"{where}.scales: dtype {table.scales.dtype!r} is none of {', '.join(SCALE_DTYPES)}")
    least, most = (-128, 127) if table.data.dtype == "int8" else (0, (1 << min(table.bits, 8)) - 1)
    if not least <= table.zero_point <= most:
        raise ValueError(f"{where}.zero_point: {table.zero_point} is outside {least}..{most}, what its values can be")
    stored = table.data.shape[1] * (2 if table.bits == 4 else 1)
    if table.columns != columns or stored < columns:
        raise ValueError(f"{where}: has {table.columns} columns of {stored} stored, expected {columns}")
    if table.block < 1 or (table.scales is None) != (table.bits == 32):
        raise ValueError(f"{where}: block {table.block}, {table.bits} bits and scales do not go together")
    if table.scales and table.scales.shape != (table.data.shape[0], -(-columns // table.block)):
        raise ValueError(
            f"{where}: scales {table.scales.shape} do not fit rows of {columns} in blocks of {table.block}"
        )


def _validate_kv(manifest: Manifest) -> None:
    specs = [spec for graph in manifest.graphs.values() for spec in (*graph.inputs, *graph.outputs)]
    for where, dtype in (("kv", manifest.kv.dtype), *((spec.name, spec.dtype) for spec in specs)):
        if dtype not in KV_PARTS:
            raise ValueError(f"{where}: dtype {dtype!r} is none of {', '.join(KV_PARTS)}")
    layers = {entry.layer: entry for entry in manifest.kv.layers}
    indices, own = [entry.layer for entry in manifest.kv.layers], manifest.target.num_own_kv_layers
    if indices != list(range(len(indices))) or len(indices) != own:
        raise ValueError(f"kv.layers: expected layers 0..{own - 1} in order, got {indices}")
    for kind in (SLIDING, FULL):
        donor = layers.get(manifest.kv.donors.get(kind, -1))
        if donor is None or donor.type != kind:
            raise ValueError(f"kv.donors.{kind}: {manifest.kv.donors.get(kind)!r} is no {kind} layer with its own KV")
        for who, spec in (("target", manifest.target), ("drafter", manifest.drafter)):
            if len(spec.inv_freq.get(kind, ())) * 2 != donor.head_dim:
                raise ValueError(
                    f"{who}.inv_freq.{kind}: {len(spec.inv_freq.get(kind, ()))} values, head_dim {donor.head_dim}"
                )


def _validate_numbers(manifest: Manifest) -> None:
    target, drafter = manifest.target, manifest.drafter
    positive = {
        "target.vocab_size": target.vocab_size,
        "target.query_heads": target.query_heads,
        "target.max_context_tokens": target.max_context_tokens,
        "kv.chunk_rows": manifest.kv.chunk_rows,
        "kv.window": manifest.kv.window,
        "drafter.num_draft_tokens": drafter.num_draft_tokens,
    }
    for entry in manifest.kv.layers:
        positive |= {f"kv.layers[{entry.layer}].{name}": getattr(entry, name) for name in ("kv_heads", "head_dim")}
    for where, value in positive.items():
        if value < 1:
            raise ValueError(f"{where}: must be at least 1, got {value}")
    for where, table in _tables(manifest):
        if where != "drafter.centroid_head.table" and table.data.shape[0] != target.vocab_size:
            raise ValueError(f"{where}: has {table.data.shape[0]} rows, vocab_size is {target.vocab_size}")
    for name, backend in manifest.backends.items():
        if not 1 <= backend.max_context_tokens <= target.max_context_tokens:
            raise ValueError(
                f"backends.{name}.max_context_tokens: {backend.max_context_tokens} is outside 1.."
                f"{target.max_context_tokens}"
            )
    if drafter.schedule not in ("constant", "heuristic"):
        raise ValueError(f"drafter.schedule: {drafter.schedule!r} is neither constant nor heuristic")
    for where, token in (
        ("bos", manifest.tokens.bos),
        ("pad", manifest.tokens.pad),
        *(("eos", t) for t in manifest.tokens.eos),
    ):
        if not 0 <= token < target.vocab_size:
            raise ValueError(f"tokens.{where}: {token} is outside 0..{target.vocab_size - 1}")
    if head := drafter.centroid_head:
        for name, dtype in (("centroids", "float32"), ("token_ordering", "int32")):
            if (found := getattr(head, name).dtype) != dtype:
                raise ValueError(f"drafter.centroid_head.{name}: dtype {found!r} is not {dtype}")
        clusters, rows = head.token_ordering.shape
        if clusters * rows != target.vocab_size or head.centroids.shape != (clusters, drafter.hidden_size):
            raise ValueError(
                f"drafter.centroid_head: {clusters} x {rows} tokens do not make a vocabulary of {target.vocab_size}"
            )
        if not 1 <= head.top_k <= clusters:
            raise ValueError(f"drafter.centroid_head.top_k: {head.top_k} of {clusters} centroids")
        _validate_table(head.table, drafter.hidden_size, "drafter.centroid_head.table")
    elif all(put.name != "logits" for put in manifest.graphs["drafter"].outputs):
        raise ValueError("drafter.centroid_head: none, and the drafter's graph gives no logits")
