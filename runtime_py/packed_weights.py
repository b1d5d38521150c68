"""XNNPACK's packed weights in a file: bundle/cache/<graph>-<.pte>-<processor>.packed.

XNNPACK rearranges all weights when a graph is loaded, into anonymous memory. Here they are packed once, into a file that
every later load maps. A record beside it (.packed.json) is written when packing has finished; it holds size, modification
and change time of the .pte and of the packed file. What it finds: a packed file that is cut short, half written, written
to, or replaced; in a copied bundle, whose files have new times, it is packed anew. What it does not find: bytes that rot
on the disk without a write. The .pte's sha256 is verified before anything reads the file, unless the record says that
this very file, by size and both times, has been verified.
"""

import ctypes
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from subprocess import DEVNULL

from .files import sha256 as hash_file
from .files import temporary_beside
from .progress import say

# Runs in a process of its own with nothing but the standard library; arguments: shim, .pte, packed file
PACK = "import ctypes, os, sys; sys.exit(ctypes.CDLL(sys.argv[1]).g4_pack(*map(os.fsencode, sys.argv[2:])))"
MAX_PATH_BYTES = 255  # what an ExecuTorch option holds


def packed_path(model: Path, sha256: str, folder: Path) -> Path:
    """The name changes with the .pte, the processor and ExecuTorch's version. OSError if it is too long."""
    path = folder / f"{model.stem}-{sha256[:16]}-{_processor()}.packed"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise OSError(f"the path of the packed weights is longer than {MAX_PATH_BYTES} bytes")
    return path


def prepare_packed(shim: ctypes.CDLL, model: Path, sha256: str, packed: Path) -> None:
    """Leaves a verified .pte and its finished packed file; packs where there is none or a doubtful one.

    The folder is locked by the caller. ValueError if the .pte is corrupt, OSError if nothing can be packed there.
    """
    record = _read_record(packed)
    verified = record.get("sha256") == sha256 and record.get("model") == _stamp(model)
    finished = packed.is_file() and record.get("packed") == _stamp(packed)
    if verified and finished:
        return
    if not verified:
        verify(model, sha256)
    if not finished:
        _pack(shim, model, packed)
    with temporary_beside(packed) as temporary:
        temporary.write_text(json.dumps({"sha256": sha256, "model": _stamp(model), "packed": _stamp(packed)}))
        shutil.copymode(model, temporary)
        os.replace(temporary, _record_path(packed))


def verify(path: Path, sha256: str) -> None:
    """ValueError if the file is missing, unreadable, or its bytes are not those that were exported."""
    if not path.is_file():
        raise ValueError(f"{path}: file is missing; export the bundle again")
    try:
        digest = hash_file(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    if digest != sha256:
        raise ValueError(
            f"{path}: sha256 is {digest}, the manifest says {sha256}; the file is corrupt, export the bundle again"
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time, the folder is made if absent. OSError if it cannot be.

    XNNPACK empties and rewrites a packed file that it cannot lock for reading at once, so two loads must not meet. The
    lock is on the folder itself: one without write access can be locked too.
    """
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _pack(shim: ctypes.CDLL, model: Path, packed: Path) -> None:
    """In a process of its own, for a disk that gets full ends it. The file gets its name when it is finished."""
    other = re.compile(rf"{re.escape(model.stem)}-[0-9a-f]{{16}}-[0-9a-f]{{16}}\.packed.*")
    for entry in packed.parent.iterdir():  # of another .pte, processor or version, or left by a process that was killed
        if other.fullmatch(entry.name):
            entry.unlink()
    say(f"{model.name}: packing weights into {packed.parent}, once")
    with temporary_beside(packed) as temporary:
        command = [sys.executable, "-ISc", PACK, shim._name, str(model.absolute()), str(temporary.absolute())]
        if code := subprocess.run(command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL).returncode:
            raise OSError(f"packing ended with code {code}, the disk may be full")
        shutil.copymode(model, temporary)  # who can read the .pte can map its weights
        os.replace(temporary, packed)


def _stamp(path: Path) -> list[int]:
    """Size in bytes, modification and change time in ns. No program can set the last one, the kernel does."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _record_path(packed: Path) -> Path:
    return packed.with_name(f"{packed.name}.json")


def _read_record(packed: Path) -> dict:
    try:
        record = json.loads(_record_path(packed).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


@cache
def _processor() -> str:
    """16 digits for what decides how XNNPACK packs: the processor's features and the library's version."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [f"model name {platform.processor()}"]
    features = {line for line in lines if line.lower().startswith(("flags", "features", "model name", "cpu part"))}
    text = "\n".join([platform.machine(), importlib.metadata.version("executorch"), *sorted(features)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
