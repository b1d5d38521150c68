"""The command line as a user calls it: what goes to stdout and stderr, and the same ids however drafts are set."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runtime_py.measure import peak_rss_mib

from .command_line import MESSAGE, PROMPT, ROOT, TOKENS, generate, remove, run
from .edits import edit_json

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
        for line in (ROOT / "README.md").read_text().split("## Use\n")[1].split("\n## ")[0].splitlines()
        if re.match(r"(echo '[^']*' \| )?python -m ", line)
    ]
    assert [line.split()[2:4] for line in lines[:2]] == [["export", "tiny"], ["runtime_py", "generate"]]
    assert len(lines) == 9
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
        f"its own draft tokens {manifest['drafter']['num_draft_tokens']}, constant",
        "token table 8 bit, a scale for 64 values",
        "per-layer table",
    ):
        assert fact in result.stdout
