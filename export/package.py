"""The pipeline: checkpoint pair -> bundle. Every graph is traced, lowered and written once; the manifest comes last."""

import dataclasses
import fcntl
import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from runtime_py import manifest as contract
from runtime_py.files import sha256
from runtime_py.manifest import FULL, SLIDING, Manifest

from . import embeddings
from .backends import Lowered, lower_pair, lowering, own_token_table, token_table
from .chat_turns import chat_turns
from .checkpoint import chat_template, check_token_maps, file_hashes, generation_config, read_config
from .config import TargetConfig, check_pair
from .quant import RECIPES, Tables, TensorError, check_ple_bits, tables
from .sizes import SIZES, check_size
from .space import check_space, needed_bytes, weight_bytes
from .special_tokens import skipped_texts, special_tokens
from .weights import Weights, open_drafter, open_target

OURS = re.compile(  # paths that an export writes, so that --force deletes nothing else
    r"manifest\.json(\.tmp)?|tokenizer\.json|chat_template\.jinja|embeddings/\w+(\.scales)?\.bin|onnx/\w+\.onnx(\.data)?"
    r"|executorch/\w+\.pte|executorch/\.constants-.*|cache/\w+-[0-9a-f]{16}-[0-9a-f]{16}\.packed(\.json)?(\.\w+)?"
)
TOOLS = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "tokenizers", "safetensors")
EXTRA_TOOLS = {"executorch"}
DEFAULT_DRAFT_TOKENS, DEFAULT_SCHEDULE = 6, "constant"  # the official assistants' generation_config
SCHEDULES = ("constant", "heuristic")
MOST_DRAFT_TOKENS = 16  # of the runtime


@dataclass(frozen=True)
class Package:
    """What an export made: the manifest, what quantizing did to each tensor of each backend, and remarks worth a line."""

    manifest: Manifest
    errors: dict[str, tuple[TensorError, ...]]
    remarks: tuple[str, ...]


def export_package(
    name: str,
    target_source: str,
    drafter_source: str,
    recipe_name: str,
    out: Path,
    force: bool = False,
    backends: tuple[str, ...] = ("onnx",),
    context: int | None = None,
    kv_dtype: str = "float32",
    ple_bits: int | None = None,
) -> Package:
    """Write the bundle `out`. context: most tokens of a text on ExecuTorch, None for the default; kv_dtype: of committed
    KV rows, a key of KV_PARTS; ple_bits: 8 or 4, of the per-layer table, None for the recipe's own.

    ValueError names what is wrong with the pair or the folder; nothing half-written loads. A pair that is called e2b
    or e4b must have that size.
    """
    check_ple_bits(recipe_name, ple_bits)
    for backend in backends:
        lowering(backend)
    configs = read_config(target_source), read_config(drafter_source)  # looked at before gigabytes are downloaded
    if name in SIZES:
        check_size(name, *configs)
    target, drafter = open_target(target_source), open_drafter(drafter_source)
    return export_pair(name, target, drafter, recipe_name, out, force, backends, context, kv_dtype, ple_bits)


def export_pair(
    name: str,
    target: Weights,
    drafter: Weights,
    recipe_name: str,
    out: Path,
    force: bool = False,
    backends: tuple[str, ...] = ("onnx",),
    context: int | None = None,
    kv_dtype: str = "float32",
    ple_bits: int | None = None,
) -> Package:
    """Write the bundle `out` of an opened pair, every byte once."""
    check_pair(target.config, drafter.config)
    if context is not None and context > (most := target.config.max_context_tokens):
        raise ValueError(f"--context {context} is above the model's own {most}; give at most that")
    remarks = _remarks(target, drafter)
    specs = tables(recipe_name, target.config.per_layer_input_size, ple_bits)
    tokens, sampling, drafting = tokens_spec(target), _sampling(target), drafting_defaults(drafter)
    chat, chat_remarks = _chat_spec(target, tokens)
    remarks += chat_remarks
    check_space(out, needed_bytes(target, drafter, recipe_name, backends, ple_bits), force)
    with _alone_in(out):
        prepare_folder(out, force, backends)
        errors: list[TensorError] = []
        total = weight_bytes(target, drafter, recipe_name, backends, ple_bits)
        with _one_thread(), tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
            target, drafter = (dataclasses.replace(weights, wrote=bar.update) for weights in (target, drafter))
            what = recipe_name, kv_dtype, target, drafter
            lowered = [lower_pair(backend, *what, context, out, bar) for backend in backends]
            bar.set_postfix_str(embeddings.FOLDER)
            token_tables = _token_tables(lowered, specs, target, out, errors)
            per_layer, head = _tables(target, drafter, specs, out, errors)
        _write_text_files(target, out)
        files, kv = _file_specs(out), _kv_spec(target.config, kv_dtype)
        manifest = Manifest(
            schema_version=contract.SCHEMA_VERSION,
            name=name,
            target=_target_spec(target, per_layer),
            drafter=_drafter_spec(drafter, head, *drafting),
            kv=kv,
            graphs=_graph_specs(lowered),
            backends={
                one.backend: contract.BackendSpec(
                    max_context_tokens=one.max_context_tokens,
                    token_table=token_tables[one.backend],
                    quantization=summarize([*one.errors, *errors], one, (target, drafter)),
                    weights_bytes=_folder_bytes(files, one.backend),
                    loaded_bytes={graph: _loaded_bytes(one, graph, files) for graph in one.modules},
                )
                for one in lowered
            },
            tokens=tokens,
            chat=chat,
            sampling=sampling,
            memory=_memory(kv, files),
            checkpoints={"target": _checkpoint_spec(target), "drafter": _checkpoint_spec(drafter)},
            versions={tool: importlib.metadata.version(tool) for tool in (*TOOLS, *EXTRA_TOOLS.intersection(backends))},
            files=files,
        )
        write_manifest(out, manifest)
        return Package(contract.load(out), {one.backend: (*one.errors, *errors) for one in lowered}, remarks)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Chunks are too small to share: threads would cost more than they do, ten times where other programs run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """The folder, made if absent, for one export at a time."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _unwritable(out, error) from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ValueError(f"{out}: another export is writing there; wait for it or choose another --out") from None
    finally:
        os.close(folder)


def _unwritable(out: Path, error: OSError) -> ValueError:
    reason = "it is a file" if out.is_file() else error.strerror
    return ValueError(f"{out}: cannot be written ({reason}); choose another --out")


def prepare_folder(out: Path, force: bool, backends: tuple[str, ...]) -> None:
    """An empty bundle folder; an existing bundle is replaced only if forced, other folders never."""
    try:
        if out.is_dir() and any(out.iterdir()):
            files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir())
            if foreign := [name for name in files if not OURS.fullmatch(name)]:
                raise ValueError(f"{out}: holds {foreign[0]!r}, which is no part of a bundle; choose another --out")
            if not force:
                raise ValueError(f"{out}: exists; choose another --out or replace it with --force")
            (out / contract.MANIFEST_NAME).unlink(missing_ok=True)  # first, so that no half-deleted bundle loads
            for path in list(out.iterdir()):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for folder in (*backends, embeddings.FOLDER):
            (out / folder).mkdir(parents=True)
    except OSError as error:
        raise _unwritable(out, error) from None


def write_manifest(out: Path, manifest: Manifest) -> None:
    """In one step: a manifest is there whole or not at all."""
    temporary = out / f"{contract.MANIFEST_NAME}.tmp"
    temporary.write_text(contract.to_json(manifest), encoding="utf-8")
    os.replace(temporary, out / contract.MANIFEST_NAME)


def summarize(errors: list[TensorError], lowered: Lowered, pair: tuple[Weights, Weights]) -> contract.QuantSpecSummary:
    """Share of the pair's checkpoint bytes that was quantized, and the tensor that suffered most.

    With one query head per kv head a single token's scores are a single row, which onnxruntime multiplies in another
    order: such a model is not row-invariant.
    """
    total = sum(place.size_bytes for weights in pair for place in weights.checkpoint.tensors.values())
    quantized = sum(error.size_bytes for error in errors if error.bits < 32)
    worst = max(errors, key=lambda error: error.relative)
    per_layer = next(error for error in errors if error.name == f"{embeddings.FOLDER}.per_layer")
    recipe = RECIPES[lowered.backend][lowered.recipe_name]
    return contract.QuantSpecSummary(
        recipe=lowered.recipe_name,
        row_invariant=recipe.row_invariant and (lowered.backend != "onnx" or pair[0].config.group > 1),
        quantized_share=quantized / total,
        worst_tensor=worst.name,
        worst_relative_error=worst.relative,
        per_layer_bits=per_layer.bits,
        per_layer_relative_error=per_layer.relative,
    )


def _remarks(target: Weights, drafter: Weights) -> tuple[str, ...]:
    """Unequal token maps are refused; what could not be compared or was left out is said."""
    remarks = [
        f"{who}: {len(keys)} tensors not used: {reason}"
        for who, weights in (("target", target), ("drafter", drafter))
        for reason, keys in weights.checkpoint.dropped.items()
    ]
    if not check_token_maps(target.checkpoint.folder, drafter.checkpoint.folder, target.config.vocab_size):
        remarks.append("drafter has no tokenizer.json: token maps not compared")
    if generation_config(drafter.checkpoint.folder, drafter.checkpoint.config).num_assistant_tokens is None:
        remarks.append(f"drafter names no num_assistant_tokens: {DEFAULT_DRAFT_TOKENS}, {DEFAULT_SCHEDULE}")
    return tuple(remarks)


def _token_tables(
    lowered: list[Lowered], specs: Tables, target: Weights, out: Path, errors: list[TensorError]
) -> dict[str, contract.TableSpec]:
    tables = {one.backend: token_table(one, target) for one in lowered}
    if None in tables.values():
        written = own_token_table(specs["token"], target, out, errors)
        tables = {backend: table or written for backend, table in tables.items()}
    return tables


def _tables(
    target: Weights, drafter: Weights, specs: Tables, out: Path, errors: list[TensorError]
) -> tuple[contract.TableSpec, contract.CentroidHeadSpec | None]:
    """The per-layer table and the drafter's centroid head, which all backends share."""
    tensor, spec, scale = "embed_tokens_per_layer.weight", specs["per_layer"], target.config.per_layer_scale
    table = embeddings.write_table(target, tensor, "per_layer", out, spec, errors, scale)
    if drafter.config.num_centroids is None:
        return table, None
    return table, embeddings.write_centroid_head(drafter, out, specs["drafter_head"], errors)


def _graph_specs(lowered: list[Lowered]) -> dict[str, contract.GraphSpec]:
    modules = lowered[0].modules
    return {
        graph: contract.GraphSpec({one.backend: one.file(graph) for one in lowered}, module.inputs, module.outputs)
        for graph, module in modules.items()
    }


def _target_spec(target: Weights, per_layer_table: contract.TableSpec) -> contract.TargetSpec:
    config = target.config
    return contract.TargetSpec(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=len(config.layers),
        num_own_kv_layers=len(config.own_layers),
        query_heads=config.query_heads,
        per_layer_input_size=config.per_layer_input_size,
        max_context_tokens=config.max_context_tokens,
        inv_freq=config.inv_freq,
        per_layer_table=per_layer_table,
    )


def drafting_defaults(drafter: Weights) -> tuple[int, str]:
    """num_assistant_tokens, at most 16, and its schedule of the drafter's generation_config; what it leaves out is the
    official one."""
    generation = generation_config(drafter.checkpoint.folder, drafter.checkpoint.config)
    count, schedule = generation.num_assistant_tokens, generation.num_assistant_tokens_schedule or DEFAULT_SCHEDULE
    count = DEFAULT_DRAFT_TOKENS if count is None else count
    if type(count) is not int or count < 1:
        raise ValueError(f"{drafter.checkpoint.folder}: num_assistant_tokens {count!r} must be at least 1")
    if schedule not in SCHEDULES:
        raise ValueError(
            f"{drafter.checkpoint.folder}: num_assistant_tokens_schedule {schedule!r} is not supported "
            f"(supported: {', '.join(SCHEDULES)})"
        )
    return min(count, MOST_DRAFT_TOKENS), schedule


def _drafter_spec(
    drafter: Weights, head: contract.CentroidHeadSpec | None, num_draft_tokens: int, schedule: str
) -> contract.DrafterSpec:
    config = drafter.config
    return contract.DrafterSpec(
        hidden_size=config.hidden_size,
        query_heads=config.query_heads,
        layer_types=tuple(layer.type for layer in config.layers),
        inv_freq=config.inv_freq,
        num_draft_tokens=num_draft_tokens,
        schedule=schedule,
        position_offset=-1,  # Transformers: the last token's position, SinglePositionMultiTokenCandidateGenerator
        centroid_head=head,
    )


def _kv_spec(config: TargetConfig, dtype: str) -> contract.KVSpec:
    layers = [
        contract.KVLayerSpec(layer.index, layer.type, config.kv_heads, layer.head_dim) for layer in config.own_layers
    ]
    return contract.KVSpec(config.window, contract.CHUNK_ROWS, tuple(layers), config.donors, dtype)


def tokens_spec(target: Weights) -> contract.TokensSpec:
    """Ids of the generation_config; what it leaves out is the config's. Names of special tokens are the tokenizer's."""
    generation = generation_config(target.checkpoint.folder, target.checkpoint.config)
    text = target.checkpoint.config.get_text_config()
    eos = generation.eos_token_id if generation.eos_token_id is not None else text.eos_token_id
    bos = generation.bos_token_id if generation.bos_token_id is not None else text.bos_token_id
    pad = generation.pad_token_id if generation.pad_token_id is not None else text.pad_token_id
    for name, value in (("eos_token_id", eos), ("bos_token_id", bos), ("pad_token_id", pad)):
        ids, limit = value if isinstance(value, list) else [value], target.config.vocab_size
        if not ids or any(type(i) is not int or not 0 <= i < limit for i in ids):
            raise ValueError(
                f"{target.checkpoint.folder}: {name} is {value!r}, generation_config.json or config.json must name "
                f"token ids from 0 to {limit - 1}"
            )
    special = special_tokens(target.checkpoint.folder, {"bos_token": bos, "pad_token": pad})
    return contract.TokensSpec(bos, pad, tuple(eos) if isinstance(eos, list) else (eos,), special)


def _sampling(target: Weights) -> contract.SamplingSpec:
    """Where generation_config leaves a field out, Transformers' default."""
    generation = generation_config(target.checkpoint.folder, target.checkpoint.config)
    for name, kinds in (("temperature", (int, float)), ("top_k", (int,)), ("top_p", (int, float))):
        if (value := getattr(generation, name)) is not None and type(value) not in kinds:
            raise ValueError(
                f"{target.checkpoint.folder}: generation_config {name} {value!r} is no {kinds[-1].__name__}"
            )
    return contract.SamplingSpec(
        do_sample=bool(generation.do_sample),
        temperature=1.0 if generation.temperature is None else float(generation.temperature),
        top_k=50 if generation.top_k is None else generation.top_k,
        top_p=1.0 if generation.top_p is None else float(generation.top_p),
    )


def _memory(kv: contract.KVSpec, files: dict[str, contract.FileSpec]) -> contract.MemorySpec:
    def row_bytes(kind: str) -> int:
        return sum(kv.row_bytes(layer) for layer in kv.layers if layer.type == kind)

    return contract.MemorySpec(
        tables_bytes=_folder_bytes(files, embeddings.FOLDER),
        kv_sliding_bytes=row_bytes(SLIDING) * kv.window,
        kv_full_bytes_per_token=row_bytes(FULL),
    )


def _loaded_bytes(lowered: Lowered, graph: str, files: dict[str, contract.FileSpec]) -> int:
    """A graph's weights in memory. ExecuTorch packs a file into as much; onnxruntime makes two float32 numbers more of every
    scale: the one it packs, and the zero point's share of a block's sum."""
    size = sum(spec.size_bytes for name, spec in files.items() if name in (path := lowered.file(graph), f"{path}.data"))
    scales = sum(len(b.flatten()) for name, b in lowered.modules[graph].named_buffers() if name.endswith(".scale"))
    return size + scales * 2 * 4 if lowered.backend == "onnx" else size


def _folder_bytes(files: dict[str, contract.FileSpec], folder: str) -> int:
    return sum(spec.size_bytes for name, spec in files.items() if name.startswith(f"{folder}/"))


def _checkpoint_spec(weights: Weights) -> contract.CheckpointSpec:
    checkpoint = weights.checkpoint
    source = checkpoint.source if checkpoint.revision else checkpoint.folder.resolve().name
    return contract.CheckpointSpec(
        source, checkpoint.revision, str(checkpoint.dtype).removeprefix("torch."), file_hashes(checkpoint)
    )


def _write_text_files(target: Weights, out: Path) -> None:
    folder = target.checkpoint.folder
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    dense = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))  # Gemma's: 13.6 MB, with white space 32.2
    (out / "tokenizer.json").write_text(dense, encoding="utf-8")
    if (template := chat_template(folder)) is not None:
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")


def _chat_spec(target: Weights, tokens: contract.TokensSpec) -> tuple[contract.ChatSpec | None, tuple[str, ...]]:
    """-> the template's pieces, and what is to be said where there are none"""
    template = chat_template(target.checkpoint.folder)
    if template is None:
        return None, ("target has no chat template: the bundle takes raw prompts only",)
    markup = {*tokens.special.values(), *skipped_texts(target.checkpoint.folder)}
    if spec := chat_turns(template, tokens.special, markup):
        return spec, ()
    return None, (
        "target's chat template is more than texts between messages: hosts without jinja take raw prompts only",
    )


def _file_specs(out: Path) -> dict[str, contract.FileSpec]:
    paths = sorted(path for path in out.rglob("*") if path.is_file())
    return {path.relative_to(out).as_posix(): contract.FileSpec(sha256(path), path.stat().st_size) for path in paths}
