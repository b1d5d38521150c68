"""The command line as a user calls it: what goes to stdout and stderr, the same ids however drafts are set, one line for
bad input, and plain decoding with a visible reason where the drafter is damaged."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime_py import manifest as contract
from runtime_py.loading import load
from runtime_py.measure import peak_rss_mib

from .edits import REMOVED, edit_json

ROOT = Path(__file__).parent.parent
PROMPT, MESSAGE, TOKENS = "ROMEO:", "How are you?", 40
FIELDS = {
    "text": str,
    "prompt_ids": list,
    "token_ids": list,
    "stop_reason": str,
    "backend": str,
    "timings": {
        "load_s": float,
        "prefill_tokens": int,
        "prefill_s": float,
        "time_to_first_token_s": float,
        "decode_s": float,
        "decode_tokens_per_second": float,
    },
    "sampling": {
        "do_sample": bool,
        "temperature": float,
        "top_k": int,
        "top_p": float,
        "min_p": float,
        "repetition_penalty": float,
        "seed": int,
    },
    "draft": {
        "rounds": int,
        "drafted": int,
        "accepted": int,
        "per_position": list,
        "per_drafter": {name: {"rounds": int, "drafted": int, "accepted": int} for name in ("mtp", "ngram")},
        "draft_tokens": int,
        "schedule": str,
        "drafters": list,
        "off_reason": type(None),
    },
    "memory": {"peak_rss_mib": float},
}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "runtime_py", *map(str, arguments)]


def environment(**settings: str) -> dict[str, str]:
    """As a user has it: stdout is buffered."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | settings


def run(*arguments: object, **settings: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env=environment(**settings),
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )


def generate(bundle: Path, *arguments: object, warnings: int = 0) -> dict:
    """The one JSON object that stdout holds; greedy where nothing is said of sampling."""
    if not {"--temperature", "--seed"}.intersection(arguments):
        arguments = ("--temperature", 0, *arguments)
    if not {"--prompt", "--prompt-ids", "--chat"} & set(arguments):
        arguments = ("--prompt", PROMPT, *arguments)
    if "--max-new-tokens" not in arguments:
        arguments = (*arguments, "--max-new-tokens", TOKENS)
    result = run("generate", bundle, "--json", *arguments)
    assert result.returncode == 0, result.stderr
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["warning"] * warnings, result.stderr
    assert result.stdout.count("\n") == 1
    return {**json.loads(result.stdout), "warning": result.stderr}


def error_of(*arguments: object) -> str:
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, ""), result
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


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


# What comes out


def assert_fields(value: object, fields: object) -> None:
    if isinstance(fields, dict):
        assert list(value) == list(fields)
        for name, kind in fields.items():
            assert_fields(value[name], kind)
    else:
        assert type(value) is fields


def test_json_has_exactly_the_documented_fields(bundle):
    result = generate(bundle, "--draft-tokens", 3, "--seed", 7)
    del result["warning"]
    assert_fields(result, FIELDS)
    draft, timings = result["draft"], result["timings"]
    assert len(draft["per_position"]) == 3
    assert draft["per_drafter"]["mtp"] == {name: draft[name] for name in ("rounds", "drafted", "accepted")}
    for place in draft["per_position"]:
        assert_fields(place, {"drafted": int, "accepted": int})
    assert sum(place["drafted"] for place in draft["per_position"]) == draft["drafted"]
    assert sum(place["accepted"] for place in draft["per_position"]) == draft["accepted"] > 0
    assert len(result["token_ids"]) == TOKENS
    assert 1 + draft["rounds"] + draft["accepted"] in (TOKENS - 1, TOKENS)  # a last round may have no room for drafts
    assert timings["prefill_tokens"] == len(result["prompt_ids"])
    assert result["stop_reason"] == "length"


def test_peak_memory_is_that_of_the_process_itself(plain):
    """not of the larger one that started it"""
    assert 20 < plain["memory"]["peak_rss_mib"] < peak_rss_mib()


def test_one_token_has_no_decode_rate(bundle, plain):
    result = generate(bundle, "--max-new-tokens", 1)
    assert result["token_ids"] == plain["token_ids"][:1]
    assert result["timings"]["decode_tokens_per_second"] is None
    assert result["draft"]["rounds"] == 0


@pytest.mark.parametrize("count", range(1, 9))
def test_any_number_of_drafts_gives_the_same_ids(bundle, plain, count):
    result = generate(bundle, "--draft-tokens", count)
    assert (result["token_ids"], result["text"]) == (plain["token_ids"], plain["text"])
    assert len(result["draft"]["per_position"]) == count


def test_zero_drafts_say_why_drafting_is_off(plain):
    assert plain["draft"] == {
        "rounds": 0,
        "drafted": 0,
        "accepted": 0,
        "per_position": [],
        "per_drafter": {name: {"rounds": 0, "drafted": 0, "accepted": 0} for name in ("mtp", "ngram")},
        "draft_tokens": 0,
        "schedule": "constant",
        "drafters": ["mtp"],
        "off_reason": "draft tokens set to 0",
    }


def test_chat_stops_at_the_end_of_the_turn(bundle):
    drafted, plain = generate(bundle, "--chat", MESSAGE), generate(bundle, "--chat", MESSAGE, "--draft-tokens", 0)
    assert drafted["token_ids"] == plain["token_ids"]
    assert (drafted["stop_reason"], drafted["token_ids"][-1]) == ("stop", 106)
    assert drafted["prompt_ids"][:2] == [2, 105]
    assert drafted["prompt_ids"].count(2) == 1


@pytest.mark.parametrize("budget", [2, 5, 17])
def test_budget_and_prompt_ids_are_taken_as_given(bundle, plain, budget):
    ids = ",".join(map(str, plain["prompt_ids"]))
    result = generate(bundle, "--prompt-ids", ids, "--max-new-tokens", budget, "--threads", 1)
    assert result["prompt_ids"] == plain["prompt_ids"]
    assert result["token_ids"] == plain["token_ids"][:budget]


def test_heuristic_schedule_drafts_other_numbers_of_the_same_text(bundle, plain):
    constant, heuristic = (
        generate(bundle, "--draft-tokens", 1, "--schedule", schedule) for schedule in ("constant", "heuristic")
    )
    assert constant["token_ids"] == heuristic["token_ids"] == plain["token_ids"]
    assert len(constant["draft"]["per_position"]) == 1 < len(heuristic["draft"]["per_position"])


@pytest.mark.parametrize("drafter", ["auto", "mtp", "ngram"])
def test_number_of_drafts_is_automatic_without_options(bundle, plain, drafter):
    """Whatever the machine's timing makes of it."""
    result = generate(bundle, "--drafter", drafter)
    assert result["token_ids"] == plain["token_ids"]
    draft = result["draft"]
    assert (draft["draft_tokens"], draft["schedule"]) == ("auto", None)
    assert draft["drafters"] == (["mtp", "ngram"] if drafter == "auto" else [drafter])
    explicit = generate(bundle, "--draft-tokens", "auto", "--drafter", drafter)
    assert (explicit["token_ids"], explicit["draft"]["draft_tokens"]) == (plain["token_ids"], "auto")


def test_schedule_alone_starts_with_the_drafters_own_number(bundle):
    assert generate(bundle, "--schedule", "constant")["draft"]["draft_tokens"] == 3


def test_lookup_drafts_without_the_drafters_files(copy):
    """The tiny pair's greedy text soon repeats itself."""
    remove(copy / "onnx/drafter.onnx")
    arguments = (copy, "--max-new-tokens", 300, "--draft-tokens")
    result = generate(*arguments, 4, "--drafter", "ngram")
    assert result["token_ids"] == generate(*arguments, 0)["token_ids"]
    assert result["draft"]["per_drafter"]["ngram"]["accepted"] == result["draft"]["accepted"] > 100
    assert result["draft"]["off_reason"] is None


def test_a_seed_gives_one_text_whatever_is_drafted(bundle):
    texts = [generate(bundle, "--seed", 3, "--draft-tokens", count) for count in (0, 1, 3, 8)]
    texts += [generate(bundle, "--seed", 3), generate(bundle, "--seed", 3, "--drafter", "ngram", "--draft-tokens", 5)]
    assert len({tuple(result["token_ids"]) for result in texts}) == 1
    assert texts[2]["draft"]["accepted"] > 0
    assert texts[0]["sampling"] == texts[4]["sampling"]
    assert generate(bundle, "--seed", 4)["token_ids"] != texts[0]["token_ids"]


def test_sampling_defaults_are_the_bundles_and_a_drawn_seed_is_reported(bundle):
    first = generate(bundle, "--temperature", 1)
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1}
    assert first["sampling"] == {**settings, "seed": first["sampling"]["seed"]}
    again = generate(bundle, "--seed", first["sampling"]["seed"])
    assert (again["token_ids"], again["sampling"]) == (first["token_ids"], first["sampling"])
    assert generate(bundle, "--temperature", 1)["sampling"]["seed"] != first["sampling"]["seed"]
    stream = run("generate", bundle, "--prompt", PROMPT, "--max-new-tokens", TOKENS, "--seed", 12)
    assert ", seed 12, " in stream.stderr


def test_every_sampling_option_arrives(bundle, plain):
    options = ("--temperature", 0.5, "--top-k", 9, "--top-p", 0.8, "--min-p", 0.1, "--repetition-penalty", 1.2)
    assert generate(bundle, *options, "--seed", 1)["sampling"] == {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.8,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "seed": 1,
    }
    assert generate(bundle, "--temperature", 1, "--top-k", 1)["token_ids"] == plain["token_ids"]
    assert plain["sampling"]["do_sample"] is False and plain["sampling"]["seed"] is None
    assert generate(bundle, "--repetition-penalty", 5.0)["token_ids"] != plain["token_ids"]


def test_streamed_text_is_the_text_of_the_json(bundle, plain):
    result = run("generate", bundle, "--prompt", PROMPT, "--max-new-tokens", TOKENS, "--temperature", 0)
    assert result.returncode == 0
    assert result.stdout == plain["text"] + "\n"
    assert result.stderr.startswith(f"[{TOKENS} tokens, ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["stream", "json"])
def test_output_is_utf8_whatever_the_locale(copy, plain, options):
    edit_json(copy / "tokenizer.json", {"decoder/decoders/0/content": "ż"})  # instead of a space
    size = (copy / "tokenizer.json").stat().st_size
    edit_json(copy / "manifest.json", {"files/tokenizer.json/size_bytes": size})
    greedy = ("--prompt", PROMPT, "--max-new-tokens", TOKENS, "--temperature", 0)
    result = run("generate", copy, *greedy, *options, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert plain["text"].replace(" ", "ż").replace("\n", "\\n" if options else "\n") in result.stdout


@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_full_context_ends_the_text(bundle, room):
    result = generate(bundle, "--prompt-ids", ",".join(["2"] * (2048 - room)))
    assert (len(result["token_ids"]), result["stop_reason"]) == (room, "context")


def test_commands_of_the_readme(tmp_path):
    """One after the other, as they stand; the drafts are worth their while and change nothing."""
    bundle = tmp_path / "bundle"
    lines = [
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if re.match(r"(echo '[^']*' \| )?python -m ", line)
    ]
    assert [line.split()[2:4] for line in lines[:2]] == [["export", "tiny"], ["runtime_py", "generate"]]
    assert len(lines) == 8
    for line in lines:
        piped, _, call = line.rpartition(" | ")
        said = shlex.split(piped)[1] if piped else ""
        words = shlex.split(call.replace("build/tiny-int8", str(bundle)))
        process = [sys.executable, *words[1:]]
        result = subprocess.run(process, cwd=ROOT, input=said, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0 and "warning" not in result.stderr, (line, result.stderr)
    drafted, plain = (generate(bundle, "--max-new-tokens", 200, "--draft-tokens", count) for count in (3, 0))
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["draft"]["accepted"] > 0.6 * drafted["draft"]["drafted"] > 0


def test_info_describes_the_bundle(bundle):
    result = run("info", bundle)
    assert (result.returncode, result.stderr) == (0, "")
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    for fact in (
        f"{manifest['target']['num_layers']} layers",
        f"window {manifest['kv']['window']}",
        f"{manifest['target']['max_context_tokens']} tokens",
        "int8",
        "onnx/drafter.onnx",
    ):
        assert fact in result.stdout


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
        (["--prompt", "a", "--seed", "-1"], "seed is -1; it must be from 0 to"),
        (["--prompt", "a", "--threads", "0"], "--threads 0 is outside 1..256; "),
        (["--prompt", "a", "--threads", "9" * 20], "is outside 1..256; "),
        (["--prompt", "a", "--beams", "4"], "unrecognized arguments: --beams 4; see "),
        (["--prompt", "a", "--schedule", "fast"], "invalid choice: 'fast'"),
        (["--prompt", "a", "--chat", "b"], "not allowed with argument --prompt; see "),
        ([], "--prompt --prompt-ids --chat is required; see "),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, list) else "",
)
def test_bad_argument_is_one_line(bundle, arguments, message):
    assert message in error_of("generate", bundle, *map(os.fsdecode, arguments))


@pytest.mark.parametrize("name", ["generate", "info"])
def test_what_is_no_bundle_is_one_line(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for folder in ("nowhere", "empty", "file"):
        options = ["--prompt", "a"] if name == "generate" else []
        line = error_of(name, tmp_path / folder, *options)
        assert f"{tmp_path / folder}: no manifest.json" in line
        assert "export it again" in line


def test_line_breaks_in_a_name_stay_within_the_line(bundle, tmp_path):
    assert "no where: no manifest.json" in error_of("info", "no\nwhere")
    copy = Path(shutil.copytree(bundle, tmp_path / "two\nlines"))
    remove(copy / "onnx/drafter.onnx")
    assert "two lines/onnx/drafter.onnx: file is missing" in generate(copy, warnings=1)["warning"]


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


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

    monkeypatch.setattr(contract, "sha256", fail)
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


def start(*arguments: object, interrupt: signal.Handlers = signal.SIG_DFL) -> subprocess.Popen:
    """With SIGINT as in a terminal: background jobs of a shell inherit it ignored."""
    return subprocess.Popen(
        command(*arguments),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, interrupt),
        bufsize=0,
    )
