"""The files of a bundle, held against what its manifest says of them."""

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .manifest import Manifest


def check_sizes(bundle: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """ValueError if a file is missing or has another size than the manifest says."""
    for name in names:
        path, want = Path(bundle) / name, manifest.files[name].size_bytes
        if not path.is_file():
            raise ValueError(f"{path}: file is missing; export the bundle again")
        if path.stat().st_size != want:
            raise ValueError(
                f"{path}: has {path.stat().st_size} bytes, the manifest says {want}; export the bundle again"
            )


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """An empty file in the same folder, removed if it still has its name afterwards."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
        temporary = Path(file.name)
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def check_hashes(bundle: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """check_sizes, then ValueError if a file's bytes are not those that were exported."""
    for name in names:
        check_sizes(bundle, manifest, (name,))
        if (digest := sha256(Path(bundle) / name)) != manifest.files[name].sha256:
            raise ValueError(
                f"{Path(bundle) / name}: sha256 is {digest}, the manifest says {manifest.files[name].sha256}; "
                "the file is corrupt, export the bundle again"
            )


def graph_files(manifest: Manifest, graph: str, backend: str) -> tuple[str, ...]:
    """The files of one graph: the model and, where it has one, its external data."""
    files = manifest.graphs[graph].files
    if backend not in files:
        raise ValueError(f"the bundle has {graph} for {', '.join(files) or 'no backend'}, not for {backend}; export it")
    model = files[backend]
    return tuple(name for name in manifest.files if name == model or name == f"{model}.data")
