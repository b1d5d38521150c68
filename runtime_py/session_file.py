"""A session on disk: one safetensors file with ids [N] int64 and the rows that the cache holds, and in its metadata what
wrote it."""

import hashlib
import os
from pathlib import Path

import numpy as np

from .cache import KVCache
from .files import temporary_beside
from .manifest import Manifest, to_json

FORMAT = "gemma4-mtp session 2"


def write(path: Path, manifest: Manifest, backend: str, ids: list[int], cache: KVCache) -> None:
    """Complete or not at all."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    first, rows = cache.rows()
    tensors = {"ids": np.array(ids, np.int64), **{name: np.ascontiguousarray(part) for name, part in rows.items()}}
    metadata = {**_writer(manifest, backend), "length": str(cache.length), "first": str(first)}
    place = path.resolve()  # through links
    if place.exists() and not place.is_file():
        raise ValueError(f"{path}: is no regular file; give another name")
    try:
        with temporary_beside(place) as part:
            save_file(tensors, part, metadata)
            os.replace(part, place)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: cannot be written ({error})") from None


def read(path: Path, manifest: Manifest, backend: str, cache: KVCache) -> list[int]:
    """The ids; the cache becomes the saved one. ValueError, and nothing changed, if it does not fit this bundle."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    except SafetensorError as error:
        raise ValueError(f"{path}: no session file ({error})") from None
    for name, value in _writer(manifest, backend).items():
        if name == "bundle" and name in metadata and metadata[name] != value:
            raise ValueError(f"{path}: another bundle wrote it; give it to that one, or start a new session")
        if metadata.get(name) != value:
            raise ValueError(f"{path}: {name} is {metadata.get(name, 'missing')}, not {value}; start a new session")
    try:
        ids, length = _ids(tensors.pop("ids", None), manifest.target.vocab_size), int(metadata["length"])
        if not length <= len(ids) <= cache.max_context_tokens:
            raise ValueError(f"{len(ids)} ids, {length} rows, a context of {cache.max_context_tokens}")
        cache.restore(length, int(metadata["first"]), tensors)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}: damaged or of another context size ({error}); start a new session") from None
    return ids


def _writer(manifest: Manifest, backend: str) -> dict[str, str]:
    """bundle: sha256 of the manifest, which has the sha256 of every other file."""
    bundle = hashlib.sha256(to_json(manifest).encode()).hexdigest()
    return {"format": FORMAT, "kv": manifest.kv.dtype, "bundle": bundle, "backend": backend}


def _ids(values: np.ndarray | None, vocab_size: int) -> list[int]:
    if values is None or values.ndim != 1 or values.dtype != np.int64:
        raise ValueError("no ids")
    ids = values.tolist()
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"an id is outside 0..{vocab_size - 1}")
    return ids
