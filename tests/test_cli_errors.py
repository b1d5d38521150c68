"""Bad input is one line, a damaged drafter means plain decoding with a visible reason, and an end that the user chooses
gives no traceback."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime_py import files
from runtime_py.loading import load

from .command_line import MESSAGE, PROMPT, ROOT, command, environment, error_of, flip, generate, remove, start, truncate
from .edits import REMOVED, edit_json


@pytest.fixture(scope="module")
def bundle(bundle_of) -> Path:
    return bundle_of("tiny")


@pytest.fixture(scope="module")
def plain(bundle) -> dict:
    return generate(bundle, "--draft-tokens", 0)


@pytest.fixture
def copy(bundle, tmp_path) -> Path:
    """A bundle to break."""
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty; give"),
        (["--chat", ""], "the message is empty; give"),
        (["--prompt", b"a\xff"], "character 1 of the text is no Unicode character; give UTF-8"),
        (["--prompt-ids", ""], "'' is no list of token ids; write integers"),
        (["--prompt-ids", "2,x"], "'2,x' is no list of token ids; write integers"),
        (["--prompt-ids", "-1"], "token id -1 is outside 0..1023; "),
        (["--prompt-ids", "2,999999"], "token id 999999 is outside 0..1023; "),
        (["--prompt-ids", ",".join(["2"] * 2049)], "2049 tokens, the context holds 2048; shorten"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens is 0; it must be at least 1"),
        (["--prompt", "a", "--max-new-tokens", "x"], "invalid int value: 'x'; see "),
        (["--prompt", "a", "--draft-tokens", "-1"], "--draft-tokens -1 is outside 0..16; "),
        (["--prompt", "a", "--draft-tokens", "17"], "--draft-tokens 17 is outside 0..16; "),
        (["--prompt", "a", "--draft-tokens", "few"], "'few' is neither auto nor a number; see "),
        (["--prompt", "a", "--draft-tokens", "auto", "--schedule", "heuristic"], "--schedule heuristic needs a number"),
        (["--prompt", "a", "--drafter", "big"], "invalid choice: 'big'"),
        (["--prompt", "a", "--temperature", "-1"], "temperature is -1.0; it must be at least 0"),
        (["--prompt", "a", "--temperature", "nan"], "temperature is nan; it must be at least 0"),
        (["--prompt", "a", "--top-k", "-1"], "top_k is -1; it must be at least 0"),
        (["--prompt", "a", "--top-k", "1.5"], "invalid int value: '1.5'; see "),
        (["--prompt", "a", "--top-p", "0"], "top_p is 0.0; it must be above 0 and at most 1"),
        (["--prompt", "a", "--top-p", "1.1"], "top_p is 1.1; it must be above 0 and at most 1"),
        (["--prompt", "a", "--min-p", "2"], "min_p is 2.0; it must be from 0 to 1"),
        (["--prompt", "a", "--repetition-penalty", "0"], "repetition_penalty is 0.0; it must be above 0"),
        (["--prompt", "a", "--repetition-penalty", "1e-300"], "repetition_penalty is 1e-300; it must be above 0, from"),
        (["--prompt", "a", "--repetition-penalty", "1e300"], "repetition_penalty is 1e+300; it must be above 0, from"),
        (["--prompt", "a", "--seed", "-1"], "seed is -1; it must be from 0 to"),
        (["--prompt", "a", "--threads", "0"], "--threads 0 is outside 1..256; "),
        (["--prompt", "a", "--threads", "9" * 20], "is outside 1..256; "),
        (
            ["--prompt", "a", "--beams", "4"],
            "unrecognized arguments: --beams 4; see python -m runtime_py generate --help",
        ),
        (
            ["--prompt", "a", "--temp", "1"],
            "unrecognized arguments: --temp 1; see python -m runtime_py generate --help",
        ),
        (["--prompt", "a", "--schedule", "fast"], "invalid choice: 'fast'"),
        (["--prompt", "a", "--chat", "b"], "not allowed with argument --prompt; see "),
        ([], "--prompt --prompt-ids --chat is required; see "),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, list) else "",
)
def test_bad_argument_is_one_line(bundle, arguments, message):
    assert message in error_of("generate", bundle, *map(os.fsdecode, arguments))


def test_a_long_value_is_shown_in_part(bundle):
    line = error_of("generate", bundle, "--prompt", "a", "--draft-tokens", "9" * 4000)
    assert line.startswith("error: --draft-tokens 999") and "9 ... 9" in line
    assert line.endswith("outside 0..16; 0 decodes without drafts") and len(line) < 1100


@pytest.mark.parametrize("name", ["generate", "info"])
def test_what_is_no_bundle_is_one_line(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    options = ["--prompt", "a"] if name == "generate" else []
    assert f"{tmp_path / 'file'}: is a file; give the folder" in error_of(name, tmp_path / "file", *options)
    for folder in ("nowhere", "empty"):
        line = error_of(name, tmp_path / folder, *options)
        assert f"{tmp_path / folder}: no manifest.json" in line
        assert "export it again" in line


def test_line_breaks_in_a_name_stay_within_the_line(bundle, tmp_path):
    assert "no where: no manifest.json" in error_of("info", "no\nwhere")
    copy = Path(shutil.copytree(bundle, tmp_path / "two\nlines"))
    remove(copy / "onnx/drafter.onnx")
    assert "two lines/onnx/drafter.onnx: file is missing" in generate(copy, warnings=1)["warning"]


def test_chat_without_a_template_is_one_line(copy):
    edit_json(copy / "manifest.json", {"files/chat_template.jinja": REMOVED})
    assert "no chat template; use a raw prompt" in error_of("generate", copy, "--chat", MESSAGE)


@pytest.mark.parametrize("damage", [remove, truncate])
@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "onnx/self_decoder.onnx",
        "onnx/cross_decoder.onnx.data",
        "embeddings/per_layer.bin",
        "tokenizer.json",
        "chat_template.jinja",
    ],
)
def test_damaged_target_is_one_line(copy, name, damage):
    damage(copy / name)
    line = error_of("generate", copy, "--prompt", PROMPT)
    assert Path(name).name in line
    if name != "manifest.json":
        assert "export the bundle again" in line


def test_target_that_onnxruntime_refuses_is_one_line(copy):
    path = copy / "onnx/self_decoder.onnx"
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert "self_decoder.onnx: onnxruntime cannot load it" in error_of("generate", copy, "--prompt", PROMPT)


# A drafter that is damaged


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        *(
            (name, damage, reason)
            for name in ("onnx/drafter.onnx", "onnx/drafter.onnx.data", "embeddings/drafter_head.bin")
            for damage, reason in ((remove, "file is missing"), (truncate, "bytes, the manifest"), (flip, "sha256 is"))
        ),
        ("embeddings/drafter_head.scales.bin", remove, "file is missing"),
        ("embeddings/drafter_centroids.bin", remove, "file is missing"),
        ("embeddings/drafter_token_ordering.bin", remove, "file is missing"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_damaged_drafter_means_plain_decoding_and_says_so(copy, plain, name: str, damage: Callable, reason: str):
    damage(copy / name)
    result = generate(copy, warnings=1)
    assert (result["token_ids"], result["text"]) == (plain["token_ids"], plain["text"])
    assert result["draft"]["rounds"] == 0
    assert f"{name}: " in result["draft"]["off_reason"]
    assert reason in result["draft"]["off_reason"]
    assert result["warning"] == f"warning: drafting is off: {result['draft']['off_reason']}\n"


def test_damaged_drafter_gives_no_warning_where_no_drafts_are_asked_for(copy, plain):
    remove(copy / "onnx/drafter.onnx")
    assert generate(copy, "--draft-tokens", 0)["draft"] == plain["draft"]


def test_drafter_that_cannot_be_read_means_plain_decoding(bundle, monkeypatch):
    def fail(path):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(files, "sha256", fail)
    pair = load(bundle, threads=1)
    assert pair.drafter is None and "Input/output error: " in pair.off_reason


# Endings that the user chooses


@pytest.mark.parametrize("taken", [0, 1], ids=["unread", "one byte read"])
@pytest.mark.parametrize(
    "arguments",
    [["generate", "--prompt", PROMPT], ["generate", "--prompt", PROMPT, "--json"], ["info"]],
    ids=["stream", "json", "info"],
)
def test_reader_that_leaves_gives_no_traceback(bundle, arguments, taken):
    process = start(*arguments, bundle)
    process.stdout.read(taken)
    process.stdout.close()
    stderr = process.stderr.read().decode()
    assert process.wait(60) == 0
    assert "Traceback" not in stderr
    assert "BrokenPipe" not in stderr


def test_closed_stdout_gives_no_traceback(bundle):
    """The shell's >&-: the process has no stdout at all."""
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *command("info", bundle)]
    result = subprocess.run(shell, cwd=ROOT, capture_output=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    "arguments", [["info"], ["generate", "--prompt", "a"], ["generate", "--prompt", "a", "--json"]]
)
def test_full_disk_is_one_line(bundle, arguments):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command(*arguments, bundle), cwd=ROOT, env=environment(), stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert result.stderr.decode().splitlines() == ["error: [Errno 28] No space left on device"]
    assert result.returncode == 2


def test_interrupt_ends_the_text_without_a_traceback(bundle):
    process = start("generate", "--prompt", PROMPT, "--max-new-tokens", 100_000, bundle)
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=60)[1].decode()
    assert process.returncode == -signal.SIGINT
    assert stderr == ""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
@pytest.mark.parametrize("library", ["numpy/_core", "onnxruntime_pybind11_state"])
def test_interrupt_while_loading_gives_no_traceback(bundle, library):
    """When the library is mapped, its import has only begun."""
    process = start("generate", "--prompt", PROMPT, "--max-new-tokens", 100_000, bundle)
    while library not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == -signal.SIGINT


def test_interrupt_that_the_caller_ignores_is_ignored(bundle):
    process = start("generate", "--prompt", PROMPT, "--max-new-tokens", 300, bundle, interrupt=signal.SIG_IGN)
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0
