"""What a bundle holds, as text."""

from pathlib import Path

from . import manifest as contract
from .files import check_sizes
from .manifest import BackendSpec, KVSpec, Manifest
from .memory import cache_bytes, cast_bytes


def print_info(bundle: Path) -> None:
    """ValueError if the manifest is wrong or a file has another size than it says."""
    manifest = contract.load(bundle)
    check_sizes(bundle, manifest, manifest.files)
    if manifest.warning:
        print(manifest.warning)
    lines = {**_model(manifest), **_backends(manifest), **_graphs(manifest)}
    width = max(map(len, lines))
    for name, line in lines.items():
        print(f"{name:{width}}  {line}")


def _model(manifest: Manifest) -> dict[str, str]:
    target, drafter, memory, sampling = manifest.target, manifest.drafter, manifest.memory, manifest.sampling
    head = f"centroid head, {drafter.centroid_head.top_k} clusters" if drafter.centroid_head else "dense head"
    size = sum(spec.size_bytes for spec in manifest.files.values())
    contexts = sorted({min(tokens, target.max_context_tokens) for tokens in (4096, 32768, target.max_context_tokens)})
    kv = ", ".join(f"{_kv_bytes(manifest.kv, tokens)} at {tokens} tokens" for tokens in contexts)
    return {
        "bundle": f"{manifest.name} ({size / 1e6:.1f} MB), schema {manifest.schema_version}",
        "target": f"{target.num_layers} layers ({target.num_own_kv_layers} with their own KV), "
        f"hidden {target.hidden_size}, vocabulary {target.vocab_size}",
        "drafter": f"{len(drafter.layer_types)} layers, hidden {drafter.hidden_size}, {head}; "
        f"{drafter.num_draft_tokens} drafts, {drafter.schedule}",
        "context": f"{target.max_context_tokens} tokens, window {manifest.kv.window}",
        "memory": f"tables {memory.tables_bytes / 1e6:.1f} MB mapped; KV in {manifest.kv.dtype}: {kv}",
        "stop tokens": ", ".join(map(str, manifest.tokens.eos)),
        "sampling defaults": f"do_sample {sampling.do_sample}, temperature {sampling.temperature}, "
        f"top_k {sampling.top_k}, top_p {sampling.top_p}",
        "checkpoints": ", ".join(
            f"{who} {spec.source}{'@' + spec.revision if spec.revision else ''} ({spec.dtype})"
            for who, spec in manifest.checkpoints.items()
        ),
        "made with": ", ".join(f"{tool} {version}" for tool, version in manifest.versions.items()),
    }


def _kv_bytes(spec: KVSpec, tokens: int) -> str:
    """Of the rows and of what a step casts of them."""
    cast = cast_bytes(spec, tokens)
    return f"{cache_bytes(spec, tokens, 0) / 1e6:.1f} MB" + (f" (+ {cast / 1e6:.1f} cast)" if cast else "")


def _backends(manifest: Manifest) -> dict[str, str]:
    return {f"backend {name}": _backend(spec) for name, spec in manifest.backends.items()}


def _backend(spec: BackendSpec) -> str:
    quality = spec.quantization
    invariance = (
        "row-invariant"
        if quality.row_invariant
        else "not row-invariant: drafted text may differ from plain text in near ties"
    )
    return (
        f"{quality.title}, weights {spec.weights_bytes / 1e6:.1f} MB, context {spec.max_context_tokens}, "
        f"{quality.quantized_share:.1%} of the bytes quantized, worst error {quality.worst_relative_error:.4f} "
        f"({quality.worst_tensor}), per-layer table {quality.per_layer_bits} bit, error "
        f"{quality.per_layer_relative_error:.4f}, {invariance}"
    )


def _graphs(manifest: Manifest) -> dict[str, str]:
    return {
        f"graph {name}": f"{len(graph.inputs)} inputs, {len(graph.outputs)} outputs, {', '.join(graph.files.values())}"
        for name, graph in manifest.graphs.items()
    }
