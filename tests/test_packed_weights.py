"""The file of packed weights: made once, made again where it is doubtful, several processes, no room for it."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runtime_py import packed_weights
from runtime_py.graph_executorch import ExecutorchGraph

from .executorch_net import Made, check_child, check_results, child, make, opened, packed_of


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    return make(tmp_path_factory.mktemp("made"))


@pytest.fixture
def bundle(made, tmp_path) -> Path:
    return shutil.copytree(made.bundle, tmp_path / "b")


def test_next_load_maps_what_the_first_packed(made, bundle, monkeypatch):
    opened(bundle, made)
    before = {path.name: path.stat().st_mtime_ns for path in (bundle / "cache").iterdir()}
    assert len(before) == 2
    modes = {path.stat().st_mode for path in (bundle / "cache").iterdir()}
    assert modes == {(bundle / "executorch/net.pte").stat().st_mode}
    for name in ("_pack", "verify"):  # neither packed nor hashed again
        monkeypatch.setattr(packed_weights, name, None)
    check_results(opened(bundle, made)(made.feeds), made.results)
    assert {path.name: path.stat().st_mtime_ns for path in (bundle / "cache").iterdir()} == before


def test_an_unreadable_file_is_named_not_its_cache(made, bundle, monkeypatch, capsys):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(packed_weights, "hash_file", refuse)
    with pytest.raises(ValueError, match=r"net\.pte: cannot be read \(Permission denied\); check its permissions"):
        opened(bundle, made)
    assert capsys.readouterr().err == ""


def test_packing_is_announced_on_a_terminal(made, bundle, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    opened(bundle, made)
    opened(bundle, made)
    assert capsys.readouterr().err == f"net.pte: packing weights into {bundle / 'cache'}, once\n"


def _flip(packed: Path) -> None:
    times = packed.stat()
    data = bytearray(packed.read_bytes())
    data[100] ^= 255
    packed.write_bytes(data)
    os.utime(packed, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    "spoil",
    [
        _flip,
        lambda packed: os.truncate(packed, packed.stat().st_size // 2),
        lambda packed: packed.write_bytes(b""),
        lambda packed: packed.unlink(),
        lambda packed: Path(f"{packed}.json").unlink(),  # killed before packing was recorded
        lambda packed: Path(f"{packed}.json").write_text("[1"),
        lambda packed: Path(f"{packed}.json").write_text("[" * 100_000),
    ],
)
def test_doubtful_packed_file_is_made_again(made, bundle, spoil):
    opened(bundle, made)
    packed = packed_of(bundle)
    good, inode = packed.read_bytes(), packed.stat().st_ino
    keep = os.open(packed, os.O_RDONLY)  # so that its inode number is not used again
    spoil(packed)
    check_results(opened(bundle, made)(made.feeds), made.results)
    os.close(keep)
    assert packed_of(bundle).read_bytes() == good and packed_of(bundle).stat().st_ino != inode


def test_packed_files_of_other_keys_and_of_killed_processes_are_removed(made, bundle):
    cache = bundle / "cache"
    cache.mkdir()
    key = "0123456789abcdef"
    stale = [f"net-{key}-{key}.packed", f"net-{key}-{key}.packed.json", f"net-{key}-{key}.packed.x1_y"]
    others = [f"net-2-{key}-{key}.packed", "notes.txt"]
    for name in (*stale, *others):
        (cache / name).write_text("old")
    opened(bundle, made)
    left = {path.name for path in cache.iterdir()}
    assert left.isdisjoint(stale) and left.issuperset(others) and len(left) == 4


HALF = "import os, signal, sys; open(sys.argv[3], 'wb').write(bytes(5000)); "
KILL_PACKER = HALF + "os.kill(os.getpid(), signal.SIGBUS)"
KILL_BOTH = HALF + "os.kill(os.getppid(), signal.SIGKILL)"


def test_killed_while_packing(made, bundle):
    code = f"from runtime_py import packed_weights; packed_weights.PACK = {KILL_BOTH!r}"
    with pytest.raises(AssertionError, match=str(-signal.SIGKILL)):
        child(made, bundle, code)
    assert list((bundle / "cache").glob("*.packed.*")) and not list((bundle / "cache").glob("*.packed"))
    (seen,) = child(made, bundle)
    check_child(seen, made)
    assert str(packed_of(bundle)) in seen["maps"] and seen["stderr"] == ""
    assert len(list((bundle / "cache").iterdir())) == 2


def test_packing_that_dies_leaves_a_working_graph(made, bundle):
    (seen,) = child(made, bundle, f"from runtime_py import packed_weights; packed_weights.PACK = {KILL_PACKER!r}")
    check_child(seen, made)
    assert seen["stderr"].count("\n") == 1 and "the disk may be full; weights are packed in memory" in seen["stderr"]
    assert not list((bundle / "cache").iterdir())


def test_folder_is_locked_while_packing_and_loading(made, bundle, monkeypatch):
    """XNNPACK empties a packed file whose lock another process holds for a moment."""
    seen = []

    def locked_inside(function):
        def call(*args):
            descriptor = os.open(bundle / "cache", os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(descriptor)
            seen.append(function.__name__)
            return function(*args)

        return call

    monkeypatch.setattr(packed_weights, "_pack", locked_inside(packed_weights._pack))
    monkeypatch.setattr(ExecutorchGraph, "_open_with", locked_inside(ExecutorchGraph._open_with))
    opened(bundle, made)
    assert seen == ["_pack", "_open_with"]


def test_packed_file_without_its_end_is_not_used(made, bundle):
    """Files may have 30000 bytes: XNNPACK keeps the rest in memory, and cannot write the index, without a word."""
    (seen,) = child(made, bundle, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))")
    check_child(seen, made)
    assert "weights are packed in memory" in seen["stderr"] and not list((bundle / "cache").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_disk_full_while_packing(made, bundle):
    (bundle / "cache").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "none", bundle / "cache"], capture_output=True)
    if mounted.returncode:
        pytest.skip("this system does not let root mount")
    try:
        (seen,) = child(made, bundle)
        check_child(seen, made)
        assert "the disk may be full; weights are packed in memory" in seen["stderr"]
        assert not list((bundle / "cache").iterdir())
    finally:
        subprocess.run(["umount", bundle / "cache"], check=True)


@pytest.mark.parametrize(
    "spoil", [lambda cache: cache.write_text("no folder"), lambda cache: cache.symlink_to("/proc")]
)
def test_bundle_that_cannot_be_written(made, bundle, spoil):
    spoil(bundle / "cache")
    (seen,) = child(made, bundle)
    check_child(seen, made)
    assert seen["stderr"].count("\n") == 1 and "weights are packed in memory" in seen["stderr"]


def test_several_processes_at_once(made, bundle, tmp_path):
    for seen in child(
        made, bundle, count=3, env={"XDG_CACHE_HOME": str(tmp_path / "home")}
    ):  # the shim is built at once too
        check_child(seen, made)
        assert seen["stderr"] == "" and str(packed_of(bundle)) in seen["maps"]
    assert len(list((bundle / "cache").iterdir())) == 2
    assert sorted(file.suffix for file in (tmp_path / "home/gemma4-mtp").iterdir()) == [".sha256", ".so"]
