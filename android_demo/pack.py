"""python3 android_demo/pack.py OUT.apk BASE.apk CLASSES.dex LIB_FOLDER: an APK, not yet signed, of what aapt2 linked, the code
and the native libraries. Standard library only.

Libraries are stored uncompressed on bounds of PAGE bytes, so that the system maps them from the APK. The bound is also
written down beside each entry (zip extra field 0xd935), for apksigner lays entries anew: without it, on bounds of 4096.
"""

import struct
import sys
import zipfile
from pathlib import Path

PAGE = 16384  # the largest memory page of Android devices
ALIGNMENT_FIELD = 0xD935
LOCAL_HEADER_BYTES = 30


def pack(out: Path, base: Path, code: Path, libraries: Path) -> None:
    with zipfile.ZipFile(out, "w") as apk:
        with zipfile.ZipFile(base) as linked:
            for entry in linked.infolist():
                _add(apk, entry.filename, linked.read(entry), entry.compress_type)
        _add(apk, "classes.dex", code.read_bytes(), zipfile.ZIP_DEFLATED)
        for path in sorted(libraries.rglob("*.so")):
            name = f"lib/{path.relative_to(libraries).as_posix()}"
            _add(apk, name, path.read_bytes(), zipfile.ZIP_STORED)


def _add(apk: zipfile.ZipFile, name: str, data: bytes, compression: int) -> None:
    entry = zipfile.ZipInfo(name)  # its date is fixed: the same content gives the same bytes
    entry.compress_type = compression
    entry.external_attr = 0o644 << 16
    if compression == zipfile.ZIP_STORED:
        start = apk.fp.tell() + LOCAL_HEADER_BYTES + len(name.encode()) + 6
        padding = -start % PAGE
        entry.extra = struct.pack("<HHH", ALIGNMENT_FIELD, 2 + padding, PAGE) + bytes(padding)
    apk.writestr(entry, data)


if __name__ == "__main__":
    pack(*map(Path, sys.argv[1:]))
