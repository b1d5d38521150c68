"""Place stored files of a ZIP where their data can be mapped: python align.py IN OUT

Libraries begin at a page of 16 KB, everything else at 4 bytes. The padding is an extra field that states the alignment (0xD935,
as Android's tools write it), so that apksigner keeps it; Debian's zipalign knows no such field, and apksigner's own pages
are of 4 KB.
"""

import struct
import sys
import zipfile

LIBRARY_PAGE, OTHERS = 1 << 14, 4
FIELD, LOCAL_HEADER = 0xD935, 30


def main(source: str, target: str) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            placed = zipfile.ZipInfo(entry.filename, (1981, 1, 1, 1, 1, 2))  # so that equal files give equal bytes
            placed.compress_type, placed.external_attr = entry.compress_type, entry.external_attr
            if entry.compress_type == zipfile.ZIP_STORED:
                alignment = LIBRARY_PAGE if entry.filename.endswith(".so") else OTHERS
                placed.extra = padding(new.fp.tell() + LOCAL_HEADER + len(entry.filename.encode()), alignment)
            new.writestr(placed, old.read(entry))


def padding(start: int, alignment: int) -> bytes:
    """An extra field from `start` on that ends at a multiple of alignment."""
    fixed = 6  # its id, its length, the alignment
    fill = -(start + fixed) % alignment
    return struct.pack("<3H", FIELD, 2 + fill, alignment) + bytes(fill)


if __name__ == "__main__":
    main(*sys.argv[1:])
