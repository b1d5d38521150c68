"""onnxruntime's Java API as the APK has it, in a JVM of this machine: the classes that the APK was made of, the JNI library of
its x86_64 half, and onnxruntime itself from the Linux wheel of the same version.

The JNI library is linked against Android's C library, of which it takes ten functions that glibc has too (malloc, strlen,
...). So it is loaded with those of glibc: what ties it to Android's versions of them is taken out of a copy.
"""

import struct
import zipfile
from pathlib import Path

import pytest

from .jvm import ROOT

AAR = ROOT / "build/android/tools/onnxruntime.aar"
CLASSES = ROOT / "build/android/app/library/onnxruntime.jar"  # as `make apk` leaves them
WHEEL = ROOT / "build/onnxruntime-1.29.0/onnxruntime/capi/libonnxruntime.so.1.29.0"
GLIBC = Path("/lib/x86_64-linux-gnu")
JNI = "libonnxruntime4j_jni.so"

PROGRAM_DYNAMIC, PROGRAM_RELRO, PROGRAM_NULL = 2, 0x6474E552, 0
VERSION_TAGS = {0x6FFFFFF0, 0x6FFFFFFE, 0x6FFFFFFF}  # DT_VERSYM, DT_VERNEED, DT_VERNEEDNUM
FLAG_TAGS = {0x1E, 0x6FFFFFFB}  # DT_FLAGS, DT_FLAGS_1: bind all functions at once
IGNORED_TAG = 0x60000000

_missing = [path for path in (AAR, CLASSES, WHEEL, GLIBC / "libc.so.6") if not path.exists()]
needs_natives = pytest.mark.skipif(
    bool(_missing),
    reason=f"no {_missing[0] if _missing else ''}: run `make apk` and install onnxruntime 1.29.0, as .ci/run does",
)


def link_natives(folder: Path) -> None:
    """A folder from which a JVM loads onnxruntime."""
    folder.mkdir()
    with zipfile.ZipFile(AAR) as aar:
        (folder / JNI).write_bytes(for_glibc(aar.read(f"jni/x86_64/{JNI}")))
    (folder / "libonnxruntime.so").symlink_to(WHEEL)
    for name, version in (("libc", 6), ("libm", 6), ("libdl", 2)):  # the names that Android's have
        (folder / f"{name}.so").symlink_to(GLIBC / f"{name}.so.{version}")


def for_glibc(library: bytes) -> bytes:
    """A 64-bit ELF library without symbol versions; functions are bound when they are called, for one of them (NNAPI's) is not
    in the wheel, and into a table that for this stays writable."""
    data = bytearray(library)
    (start,), (size, count) = struct.unpack_from("<Q", data, 0x20), struct.unpack_from("<2H", data, 0x36)
    for header in range(start, start + size * count, size):
        (kind,) = struct.unpack_from("<I", data, header)
        if kind == PROGRAM_RELRO:
            struct.pack_into("<I", data, header, PROGRAM_NULL)
        elif kind == PROGRAM_DYNAMIC:
            (first,), (length,) = (
                struct.unpack_from("<Q", data, header + 8),
                struct.unpack_from("<Q", data, header + 32),
            )
            for entry in range(first, first + length, 16):
                (tag,) = struct.unpack_from("<Q", data, entry)
                if tag in VERSION_TAGS:
                    struct.pack_into("<Q", data, entry, IGNORED_TAG)
                elif tag in FLAG_TAGS:
                    struct.pack_into("<Q", data, entry + 8, 0)
    return bytes(data)
