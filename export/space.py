"""What an export writes, in bytes: for the progress bar, and to refuse a disk that is too small before it is full."""

import shutil
from pathlib import Path

import torch
from torch import nn

from .config import DrafterConfig, TargetConfig
from .graphs import CrossDecoder, Drafter, SelfDecoder
from .quant import RECIPES, QuantSpec, Recipe, tables
from .weights import Weights, states, written_bytes

BESIDE_WEIGHTS = 1 << 24  # bytes: graphs, padding, manifest


def weight_bytes(
    target: Weights, drafter: Weights, recipe_name: str, backends: tuple[str, ...], ple_bits: int | None = None
) -> int:
    """Bytes of quantized weights that an export writes in all: the graphs of every backend and the tables."""
    graphs = sum(sum(_graphs(target, drafter, recipe_name, backend)) for backend in backends)
    return graphs + _tables(target.config, drafter.config, recipe_name, ple_bits)


def needed_bytes(
    target: Weights, drafter: Weights, recipe_name: str, backends: tuple[str, ...], ple_bits: int | None = None
) -> int:
    """Most bytes on disk at a time. ExecuTorch keeps two copies of a graph's weights beside its file, a byte a value."""
    files = weight_bytes(target, drafter, recipe_name, backends, ple_bits)
    files += (target.checkpoint.folder / "tokenizer.json").stat().st_size + BESIDE_WEIGHTS
    if "executorch" not in backends:
        return files
    return files + 2 * max(_graphs(target, drafter, recipe_name, "executorch", unpacked=True))


def check_space(out: Path, needed: int, force: bool) -> None:
    """ValueError if the disk of `out` cannot hold so many bytes. What --force replaces counts as free."""
    folder = next(path for path in (out, *out.absolute().parents) if path.exists())
    usage, free = shutil.disk_usage(folder), shutil.disk_usage(folder).free
    if force and out.is_dir():
        free += sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    if usage.total and free < needed:  # what is no disk has a total of 0
        raise ValueError(
            f"{out}: the export needs {_amount(needed)} on disk, {_amount(free)} are free; choose another --out"
        )


def _amount(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"


def _graphs(target: Weights, drafter: Weights, recipe_name: str, backend: str, unpacked: bool = False) -> list[int]:
    """Bytes of each graph's weights."""
    recipe = RECIPES[backend][recipe_name]
    graphs = ((SelfDecoder, target.config), (CrossDecoder, target.config), (Drafter, drafter.config))
    return [_graph(graph, config, recipe, unpacked) for graph, config in graphs]


def _graph(graph: type[nn.Module], config: TargetConfig | DrafterConfig, recipe: Recipe, unpacked: bool) -> int:
    with torch.device("meta"):
        module = graph(config, recipe)
    total = 0
    for name, ref, spec in states(module, config):
        columns = module.get_buffer(name)[0].numel()
        form = QuantSpec(8, spec.group) if spec and unpacked else spec
        total += written_bytes(ref.stop - ref.start, columns, form)
    return total


def _tables(target: TargetConfig, drafter: DrafterConfig, recipe_name: str, ple_bits: int | None) -> int:
    specs = tables(recipe_name, target.per_layer_input_size, ple_bits)
    per_layer = len(target.layers) * target.per_layer_input_size
    found = [(target.vocab_size, per_layer, specs["per_layer"])]
    if not target.tied_head:
        found.append((target.vocab_size, target.hidden_size, specs["token"]))
    if drafter.num_centroids:
        found.append((drafter.vocab_size, drafter.hidden_size, specs["drafter_head"]))
        found.append((drafter.num_centroids, drafter.hidden_size, None))
    return sum(written_bytes(*table) for table in found)
