"""Whether a bundle fits, told before anything is loaded: the sizes are those of what is loaded then."""

import ctypes
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runtime_py import loading, memory, session
from runtime_py import manifest as contract
from runtime_py.__main__ import main
from runtime_py.cache import KVCache
from runtime_py.graph import load_graph
from runtime_py.memory import Needs, available_bytes, cache_bytes, check_fits, needs

from .edits import error_line

MB = 1_000_000
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bundle(bundle_of):
    return bundle_of("tiny")


@pytest.mark.parametrize("dtype", contract.KV_PARTS)
@pytest.mark.parametrize(("context", "margin"), [(1, 0), (128, 0), (129, 0), (2048, 0), (1000, 1024)])
def test_rows_are_those_of_a_cache(bundle, context, margin, dtype):
    spec = dataclasses.replace(contract.load(bundle).kv, dtype=dtype)
    cache = KVCache(spec, 1, context, margin)
    buffers = [*cache._past.values(), *cache._tail.values(), cache._donor_ring]
    buffers += cache._closed.values() if margin else []
    assert cache_bytes(spec, context, margin) == sum(part.nbytes for pair in buffers for part in pair)


@pytest.mark.parametrize(("dtype", "cast"), [("float32", 0), ("float16", 2 * 4 * 64 * 100), ("int8", 2 * 4 * 64 * 100)])
def test_narrower_rows_need_a_full_layers_in_float32_too(bundle, dtype, cast):
    manifest = contract.load(bundle)
    narrow = dataclasses.replace(manifest, kv=dataclasses.replace(manifest.kv, dtype=dtype))
    assert needs(narrow, "onnx", 100, 0, True).kv_bytes == cache_bytes(narrow.kv, 100, 0) + cast


@pytest.mark.parametrize(("recipe", "block"), [("int8", 64), ("small", 128)])
def test_needs_are_the_weights_of_the_graphs(bundle_of, recipe, block):
    """Files, and of every scale two float32 numbers more that onnxruntime makes."""
    bundle = bundle_of("tiny", recipe)
    manifest = contract.load(bundle)
    need, plain = (needs(manifest, "onnx", 100, 0, drafts) for drafts in (True, False))
    files = {path.name: path.stat().st_size for path in (bundle / "onnx").iterdir()}
    target = sum(size for name, size in files.items() if "decoder" in name)
    assert need.weights_bytes == plain.weights_bytes > target
    head = contract.load(bundle).backends["onnx"].token_table
    assert head.block == block and need.weights_bytes - target > 8 * head.data.shape[0] * head.columns / block
    centroids = (bundle / manifest.drafter.centroid_head.centroids.file).stat().st_size
    assert need.drafter_bytes > sum(files.values()) - target + centroids > 0 == plain.drafter_bytes
    assert need.kv_bytes == cache_bytes(manifest.kv, 100, 0) < needs(manifest, "onnx", 2000, 0, True).kv_bytes


def test_a_byte_too_much_is_refused_with_both_numbers():
    need = Needs(1500 * MB, 80 * MB, 420 * MB, 4096)
    check_fits(need, 2000 * MB)
    check_fits(need, None)
    with pytest.raises(ValueError) as refusal:
        check_fits(need, 2000 * MB - 1)
    assert "weights 1500.0 MB + drafter 80.0 MB + KV 420.0 MB (4096 tokens) against 2000.0 MB available" in str(
        refusal.value
    )
    with pytest.raises(ValueError, match=r"weights 1500.0 MB \+ KV"):
        check_fits(dataclasses.replace(need, drafter_bytes=0), 1)


def test_available_memory(tmp_path):
    assert available_bytes(tmp_path / "nowhere") is None
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemFree:  2 kB\nMemAvailable:    5 kB\n")
    assert available_bytes(tmp_path / "meminfo") == 5 * 1024
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\n")
    assert available_bytes(tmp_path / "meminfo") is None


COMMANDS = {"generate": ["--prompt", "a", "--max-new-tokens", 2], "chat": [], "serve": [], "check": [], "bench": []}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_loads_refuses(bundle, monkeypatch, capsys, name):
    monkeypatch.setattr(memory, "available_bytes", lambda: 10_000)
    line = error_line(main, [name, bundle, *COMMANDS[name], "--backend", "onnx"], capsys)
    assert "against 0.0 MB available: close other programs" in line and "--force" in line


def test_force_runs_it(bundle, monkeypatch, capsys):
    monkeypatch.setattr(memory, "available_bytes", lambda: 10_000)
    arguments = [
        "generate",
        str(bundle),
        "--prompt",
        "a",
        "--max-new-tokens",
        "2",
        "--backend",
        "onnx",
        "--threads",
        "1",
    ]
    assert main([*arguments, "--json", "--force"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 2


def test_a_short_text_needs_few_rows(bundle, monkeypatch, capsys):
    """A generation is refused for what it can touch, a conversation for the whole context."""
    manifest = contract.load(bundle)
    short = needs(manifest, "onnx", 512, 0, True).total_bytes
    monkeypatch.setattr(memory, "available_bytes", lambda: short)
    options = [str(bundle), "--backend", "onnx", "--threads", "1"]
    assert main(["generate", *options, "--prompt", "a", "--max-new-tokens", "9"]) == 0
    capsys.readouterr()
    assert "(1290 tokens)" in error_line(
        main, ["generate", *options, "--prompt", "a" * 1030, "--max-new-tokens", 4], capsys
    )
    assert "(2048 tokens)" in error_line(main, ["chat", *options], capsys)


def test_context_ends_the_text_and_has_bounds(bundle, capsys):
    options = ["generate", str(bundle), "--prompt-ids", "2,40,41", "--backend", "onnx", "--threads", "1", "--json"]
    assert main([*options, "--context", "8"]) == 0
    reply = json.loads(capsys.readouterr().out)
    assert (len(reply["token_ids"]), reply["stop_reason"]) == (5, "context")
    for context in ("0", "2049"):
        assert f"--context {context} is outside 1..2048" in error_line(main, [*options, "--context", context], capsys)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc, where nothing is given back")
def test_free_memory_is_given_back():
    """Blocks of 64 KiB with one of 4 KiB that stays between every two, so that the allocator alone would give none of it
    back; in a process of their own, where nothing else is freed."""
    result = subprocess.run([sys.executable, "-c", HOLES], cwd=ROOT, capture_output=True, text=True, check=True)
    before, kept, after = map(int, result.stdout.split())
    assert before - kept < 5 * MB and kept - after > 40 * MB


@pytest.mark.skipif(sys.platform != "linux", reason="pages stay elsewhere")
def test_pages_that_packing_has_read_leave_memory(bundle):
    file = str((bundle / "onnx/cross_decoder.onnx.data").resolve())
    graph = load_graph(bundle, contract.load(bundle), "cross_decoder", "onnx", 1)
    mapped = resident = 0
    for area in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(encoding="utf-8")):
        if area.splitlines()[0].endswith(file):
            size, rss = (int(re.search(rf"^{name}: +(\d+) kB", area, re.M)[1]) for name in ("Size", "Rss"))
            mapped, resident = mapped + size, resident + rss
    assert graph and mapped > 0 == resident


HOLES = """
import ctypes, resource
from runtime_py.memory import give_back

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [libc.malloc(size) for _ in range(1000) for size in (64 << 10, 4 << 10)]
for block in blocks[::2]:
    ctypes.memset(block, 1, 64 << 10)
print(resident_bytes())
for block in blocks[::2]:
    libc.free(block)
print(resident_bytes())
give_back()
print(resident_bytes())
"""


def test_memory_is_given_back_after_a_load_and_a_long_prompt(bundle, monkeypatch):
    calls = []
    monkeypatch.setattr(loading, "give_back", lambda: calls.append("load"))
    monkeypatch.setattr(session, "give_back", lambda: calls.append("prompt"))
    chat = session.Session(loading.load(bundle, 2))
    for length, expected in ((50, ["load"]), (300, ["load", "prompt"]), (310, ["load", "prompt"])):
        chat.generate([3 + i % 100 for i in range(length)], session.Settings(max_new_tokens=4))
        assert calls == expected
