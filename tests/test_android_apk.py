"""The APK that `make apk` built: signed, aligned for 16 KB pages, of two ABIs, without a permission, and with the classes that
its manifest names."""

import re
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

APK = Path(__file__).parent.parent / "build/android/gemma4-mtp.apk"
PAGE_BYTES = 0x4000
LIBRARIES = {
    f"lib/{abi}/{name}" for abi in ("arm64-v8a", "x86_64") for name in ("libonnxruntime.so", "libonnxruntime4j_jni.so")
}
pytestmark = pytest.mark.skipif(
    not (APK.is_file() and shutil.which("aapt2") and shutil.which("apksigner")), reason="no APK here: make apk"
)


@pytest.fixture(scope="module")
def apk() -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(APK) as archive:
        yield archive


def run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_signature_verifies():
    out = run("apksigner", "verify", "--verbose", "--min-sdk-version", 26, APK)
    assert "Verified using v2 scheme (APK Signature Scheme v2): true" in out


def test_badging():
    out = run("aapt2", "dump", "badging", APK)
    assert "package: name='gemma4.mtp.app'" in out
    assert "sdkVersion:'26'" in out and "targetSdkVersion:'35'" in out
    assert "launchable-activity: name='gemma4.mtp.app.MainActivity'" in out
    assert "uses-permission" not in out
    assert "native-code: 'arm64-v8a' 'x86_64'" in out


def test_libraries_are_mapped_from_the_file(apk):
    """Stored as they are, at the beginning of a page, and to be loaded at pages of 16 KB."""
    assert {name for name in apk.namelist() if name.startswith("lib/")} == LIBRARIES
    for name in LIBRARIES:
        entry = apk.getinfo(name)
        assert entry.compress_type == zipfile.ZIP_STORED, name
        assert data_offset(entry) % PAGE_BYTES == 0, name
        assert all(alignment >= PAGE_BYTES for alignment in load_alignments(apk.read(name))), name


def test_resources_are_mapped_too(apk):
    """Which Android demands from version 11 on."""
    entry = apk.getinfo("resources.arsc")
    assert entry.compress_type == zipfile.ZIP_STORED and data_offset(entry) % 4 == 0


def data_offset(entry: zipfile.ZipInfo) -> int:
    with open(APK, "rb") as file:
        file.seek(entry.header_offset)
        name, extra = struct.unpack("<26x2H", file.read(30))
    return entry.header_offset + 30 + name + extra


def load_alignments(library: bytes) -> list[int]:
    """Of the LOAD segments of a 64-bit ELF file."""
    (start,), (size, count) = struct.unpack_from("<Q", library, 0x20), struct.unpack_from("<2H", library, 0x36)
    segments = [start + i * size for i in range(count)]
    found = [struct.unpack_from("<Q", library, at + 0x30)[0] for at in segments if library[at : at + 4] == b"\1\0\0\0"]
    assert found
    return found


def dex_classes(dex: bytes) -> set[str]:
    """Names of the classes that a dex file defines."""
    (strings,), (types,) = struct.unpack_from("<I", dex, 0x3C), struct.unpack_from("<I", dex, 0x44)
    count, classes = struct.unpack_from("<2I", dex, 0x60)
    names = set()
    for i in range(count):
        (kind,) = struct.unpack_from("<I", dex, classes + 32 * i)
        (string,) = struct.unpack_from("<I", dex, types + 4 * kind)
        (at,) = struct.unpack_from("<I", dex, strings + 4 * string)
        text = dex[at:].split(b"\0", 1)[0] if dex[at] < 0x80 else dex[at + 1 :].split(b"\0", 1)[0]
        names.add(text[1:].decode("utf-8")[1:-1].replace("/", "."))
    return names


def test_dex_has_no_lambda(apk):
    """Android's runtime makes none, and dx would let them pass: no call site stands in the map of the file."""
    dex = apk.read("classes.dex")
    (at,) = struct.unpack_from("<I", dex, 0x34)
    (count,) = struct.unpack_from("<I", dex, at)
    kinds = {struct.unpack_from("<H", dex, at + 4 + 12 * i)[0] for i in range(count)}
    assert {0x0001, 0x0006} <= kinds and not kinds & {0x0007, 0x0008}, "call sites and method handles"


def test_dex_holds_the_classes_that_the_manifest_names(apk):
    classes = dex_classes(apk.read("classes.dex"))
    tree = run("aapt2", "dump", "xmltree", "--file", "AndroidManifest.xml", APK)
    assert re.search(r"launchMode[^\n]*=1", tree), "else the arrow of another screen ends the conversation"
    named = set(re.findall(r'android:name[^\n]*="(gemma4\.[\w.]+)"', tree))
    assert {"gemma4.mtp.app.App", "gemma4.mtp.app.MainActivity"} <= named <= classes
    assert {"gemma4.mtp.Speculative", "ai.onnxruntime.OrtSession"} <= classes
    assert not any("elemetry" in name for name in classes)
