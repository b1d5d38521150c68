"""A bench's numbers follow from its runs, its runs take turns, and its report says what is true and needs no network."""

import dataclasses
import html
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime_py import bench_threads
from runtime_py.__main__ import main
from runtime_py.bench import GraphTimer, Run, differing_texts, encode, notes, rotated, run_all, summarize
from runtime_py.bench_prompts import PROMPTS, Prompt, read_prompts
from runtime_py.bench_report import html as html_report
from runtime_py.bench_report import text as text_report
from runtime_py.session import Session
from runtime_py.speculative import Round

from .command_line import ROOT, error_of, remove, run
from .conftest import BACKENDS
from .doubles import Script
from .edits import error_line
from .test_session import scripted

KINDS = ["chat", "code"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SWITCHES = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


# Numbers from runs


def made_run(mode, repeat: int, decode_s: float, prompt: int = 0, accepted: int = 2, **changes) -> Run:
    """A prompt of 10 tokens in 0.5 s, then a token of the prefill, and two rounds of 3 drafts or 6 without."""
    if mode:
        rounds = [Round((7,), 0, 0, None), *[Round((8,) * (accepted + 1), 3, accepted, None, "mtp")] * 2]
    else:
        rounds = [Round((7,), 0, 0, None)] * 7
    ids = tuple(token for entry in rounds for token in entry.tokens)
    whole = Run(mode, prompt, repeat, 10, ids, 0.5, decode_s, 0.6, 0.3, tuple(rounds))
    return dataclasses.replace(whole, **changes)


def test_rates_are_medians_over_repeats_of_sums_over_prompts():
    runs = [made_run(0, repeat, seconds, prompt) for repeat, seconds in enumerate((2.0, 3.0, 1.0)) for prompt in (0, 1)]
    runs += [made_run(3, repeat, 1.0, prompt) for repeat in range(3) for prompt in (0, 1)]
    plain, drafted = summarize(runs, [0, 3], KINDS)
    assert plain["decode_tokens_per_second"] == {"median": 3.0, "lowest": 2.0, "highest": 6.0}
    assert plain["speedup"] == {"median": 1.0, "lowest": 1.0, "highest": 1.0}
    assert drafted["speedup"] == {"median": 2.0, "lowest": 1.0, "highest": 3.0}  # repeat by repeat
    assert drafted["prefill_tokens_per_second"]["median"] == 20
    assert drafted["time_to_first_token_s"]["highest"] == 0.5
    assert (plain["tokens_per_round"], drafted["tokens_per_round"]) == (1, 3)
    assert [place["share"] for place in drafted["acceptance_per_position"]] == [1, 1, 0]
    assert drafted["acceptance_per_position"][2] == {"drafted": 12, "accepted": 0, "share": 0}
    assert plain["acceptance_per_position"] == []
    assert drafted["time_share"] == pytest.approx({"target": 0.4, "drafter": 0.2, "host": 0.4})


def test_kinds_are_told_apart():
    runs = [made_run(3, 0, 1.0, prompt=0, accepted=3), made_run(3, 0, 2.0, prompt=1, accepted=0)]
    (drafted,) = summarize(runs, [3], KINDS)
    assert drafted["kinds"]["chat"]["decode_tokens_per_second"]["median"] == 8
    assert drafted["kinds"]["code"]["decode_tokens_per_second"]["median"] == 1
    assert [drafted["kinds"][kind]["acceptance"] for kind in KINDS] == [1, 0]
    assert drafted["speedup"] is None  # plain decoding was not run


def test_texts_that_end_at_once_have_no_rate():
    ended = made_run(0, 0, 0.0, token_ids=(7,), rounds=(Round((7,), 0, 0, "stop"),))
    (plain,) = summarize([ended], [0], KINDS)
    assert plain["decode_tokens_per_second"] is plain["speedup"] is plain["tokens_per_round"] is None


def test_texts_that_differ_are_counted():
    texts = [(0, (3,)), (0, (3,)), (1, (4,)), (1, (5,))]
    runs = [made_run(0, i % 2, 1.0, prompt, token_ids=ids) for i, (prompt, ids) in enumerate(texts)]
    assert differing_texts(runs) == 1 and differing_texts(runs[:3]) == 0


def test_time_in_graphs():
    now = [0.0]
    timer = GraphTimer(clock=lambda: now[0])

    def takes(seconds: float):
        def graph(feeds):
            now[0] += seconds
            return feeds

        return graph

    graphs = {
        name: timer.wrap(name, takes(s)) for name, s in (("self_decoder", 1), ("cross_decoder", 2), ("drafter", 4))
    }
    assert graphs["self_decoder"]({"x": 1}) == {"x": 1}
    graphs["cross_decoder"]({})
    graphs["drafter"]({})
    now[0] += 100
    assert timer.take() == (3, 4)
    assert timer.take() == (0, 0)


# Runs


def session_of(script: Script) -> Session:
    session = scripted(script)
    drafter = SimpleNamespace(num_draft_tokens=3, schedule="heuristic")
    manifest = SimpleNamespace(tokens=session.pair.manifest.tokens, drafter=drafter)
    return Session(dataclasses.replace(session.pair, manifest=manifest))


def test_modes_take_turns_and_write_one_text():
    session = session_of(Script())
    prompts = [[2, 50, 60], [2, 70, 80, 90]]
    runs, off_reasons = run_all(session, GraphTimer(), prompts, (0, 2, "auto"), 2, 12, "auto")
    assert [(entry.repeat, entry.prompt, entry.mode) for entry in runs] == [
        *((0, 0, 0), (0, 0, 2), (0, 0, "auto"), (0, 1, 2), (0, 1, "auto"), (0, 1, 0)),
        *((1, 0, 2), (1, 0, "auto"), (1, 0, 0), (1, 1, "auto"), (1, 1, 0), (1, 1, 2)),
    ]
    for entry in runs:
        assert list(entry.token_ids) == Script().reference(prompts[entry.prompt], 12)
        assert entry.prompt_tokens == len(prompts[entry.prompt]) and entry.prefill_s > 0
        drafted = {round_.drafted for round_ in entry.rounds}
        assert drafted == {0} if entry.mode == 0 else drafted <= {0, 1, 2} and 2 in drafted if entry.mode == 2 else True
    assert len(off_reasons) <= 2 and all(reason.startswith("drafting ") for reason in off_reasons)


def test_every_run_begins_without_the_rows_of_another():
    session = session_of(Script())
    run_all(session, GraphTimer(), [[2, 50, 60]], (0,), 2, 12, "auto")
    assert session.pair.target.calls == [3, *[1] * 7, *[3, *[1] * 11] * 2]  # a warm-up of 8 tokens first


@pytest.mark.parametrize("auto", [True, False])
def test_reasons_of_auto_are_those_of_each_repeat(monkeypatch, auto):
    reasons = iter(["drafting does not pay: 1", None, "drafting does not pay: 3"])
    monkeypatch.setattr("runtime_py.drafting.AutoPolicy.off_reason", lambda policy: next(reasons))
    _, found = run_all(session_of(Script()), GraphTimer(), [[2, 50]], ("auto" if auto else 1,), 3, 4, "auto")
    assert found == (["drafting does not pay: 1", "drafting does not pay: 3"] if auto else [])


def test_each_mode_is_first_as_often():
    assert rotated([0, 1, "auto"], 4) == [1, "auto", 0]
    assert Counter(rotated([0, 1, "auto"], turn)[0] for turn in range(9)) == {0: 3, 1: 3, "auto": 3}


# Prompts


def test_built_in_prompts_are_of_every_kind():
    assert [prompt.kind for prompt in PROMPTS] == ["chat", "code", "summary", "rewrite", "JSON", "translation"]


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"kind": "a", "text": "Grüße"}\n\n{"text": "b", "kind": "c"}\n', encoding="utf-8")
    assert read_prompts(path) == (Prompt("a", "Grüße"), Prompt("c", "b"))
    path.write_text('{"kind": "a", "text": "b\u2028c"}\n', encoding="utf-8")  # a line break, but of the text's own
    assert read_prompts(path) == (Prompt("a", "b\u2028c"),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no prompts; write"),
        (b"hello\n", "line 1 is 'hello'; write"),
        (b'{"kind": "a", "text": "b"}\n{"kind": "a"}', 'line 2 is \'{"kind": "a"}\'; write'),
        (b'{"kind": "a", "text": 3}', "line 1: text is 3; give a text"),
        (b'{"kind": "", "text": "b"}', "line 1: kind is ''; give a text"),
        (b"\xff", "no UTF-8"),
        (b"[" * 100_000, "line 1 is '[[["),
        (b'\n{"kind": "a", "text": "\\ud800"}', r"line 2: text is '\ud800'; give a text"),
    ],
    ids=["empty", "text", "key missing", "number", "empty kind", "no UTF-8", "deep", "half a character"],
)
def test_bad_prompts_are_named(tmp_path, content, message):
    (tmp_path / "prompts").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_prompts(tmp_path / "prompts")


def test_a_prompt_without_room_is_named():
    text = SimpleNamespace(encode_prompt=lambda text: [2] * len(text))
    pair = SimpleNamespace(manifest=SimpleNamespace(files={}), text=text)
    assert encode(pair, [Prompt("code", "abc")], 10, 7) == [[2, 2, 2]]
    with pytest.raises(
        ValueError, match="the code prompt has 3 tokens and 8 are to follow, the context holds 10; give fewer"
    ):
        encode(pair, [Prompt("code", "abc")], 10, 8)


# Threads


def test_candidates_are_all_numbers_or_steps():
    assert bench_threads.candidates(1) == [1]
    assert bench_threads.candidates(6) == [1, 2, 3, 4, 5, 6]
    assert bench_threads.candidates(8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert bench_threads.candidates(9) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert bench_threads.candidates(20) == [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20]


def test_fastest_threads_decode_fastest():
    timed = [{"threads": n, "decode_s": s, "verify_s": 1 / n} for n, s in ((1, 0.3), (2, 0.2), (4, 0.25))]
    assert bench_threads.fastest(timed) == 2


def test_a_number_of_threads_that_does_not_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"--threads 2 does not run: .*no manifest.json"):
        bench_threads.time_threads(tmp_path, "onnx", [2], lambda line: None)


# The command


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> list[object]:
    path = tmp_path_factory.mktemp("bench") / "prompts.jsonl"
    lines = [{"kind": kind, "text": text} for kind, text in (("chat", "Who goes there?"), ("code", "O <b>Romeo</b>"))]
    path.write_text("\n".join(map(json.dumps, lines)))
    return ["--prompts", path, "--tokens", 16, "--repeats", 2]


@pytest.fixture(scope="module")
def result(bundle_of, asked) -> dict:
    done = run("bench", bundle_of("tiny"), *asked, "--json", "--draft-tokens", "0,3,auto", "--threads", 1)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


@pytest.mark.parametrize("backend", BACKENDS)
def test_json_has_what_was_measured(request, bundle_of, asked, backend):
    if backend == "onnx":
        got = request.getfixturevalue("result")
    else:
        options = ("--json", "--draft-tokens", "0,3,auto", "--threads", 1)
        got = json.loads(run("bench", bundle_of("tiny", "int8", backend), *asked, *options).stdout)
    assert (got["bundle"], got["recipe"], got["backend"], got["threads"]) == ("tiny", "int8", backend, 1)
    assert (got["repeats"], got["tokens"], got["prompt_count"], got["differing_texts"]) == (2, 16, 2, 0)
    assert [mode["draft_tokens"] for mode in got["modes"]] == [0, 3, "auto"]
    plain, drafted, _ = got["modes"]
    assert plain["speedup"]["lowest"] == plain["tokens_per_round"] == 1 and plain["time_share"]["drafter"] == 0
    assert len(drafted["acceptance_per_position"]) == 3 and drafted["tokens_per_round"] > 1.5
    for mode in got["modes"]:
        assert sum(mode["time_share"].values()) == pytest.approx(1)
        assert 0 < mode["time_share"]["target"] < 1 and mode["time_share"]["host"] > 0
        rate = mode["decode_tokens_per_second"]
        assert 0 < rate["lowest"] <= rate["median"] <= rate["highest"]
        assert list(mode["kinds"]) == KINDS
    assert drafted["time_share"]["drafter"] > 0
    files = sum(path.stat().st_size for path in bundle_of("tiny", "int8", backend).rglob("*") if path.is_file())
    assert 0 < got["memory"]["bundle_bytes"] < files and got["memory"]["peak_rss_mib"] > 20
    assert got["probe"]["argmax_flips"] == 0 and got["probe"]["verdict"].startswith("drafting ")


def test_text_has_the_numbers_of_the_json(result):
    lines = text_report(result).splitlines()
    assert lines[0].startswith("tiny int8 on onnx, threads: 1, ")
    assert "up to 16 new tokens, greedy, 2 repeats in turns: median (lowest to highest)" in lines[1]
    rows = {line.split()[0]: line for line in lines[4:8] if line}
    for mode in result["modes"]:
        rate = mode["decode_tokens_per_second"]
        shown = f"{rate['median']:.1f} ({rate['lowest']:.1f} to {rate['highest']:.1f})"
        assert shown in rows[str(mode["draft_tokens"])]
    assert "- the text is the same with every number of drafts" in lines
    assert any(line.startswith("verdict") and line.endswith(f": {result['probe']['verdict']}") for line in lines)


def test_drafting_that_is_off_says_why(bundle_of, asked, tmp_path):
    copy = Path(shutil.copytree(bundle_of("tiny"), tmp_path / "bundle"))
    remove(copy / "onnx/drafter.onnx")
    done = run("bench", copy, *asked, "--repeats", 1, "--threads", 1, "--json")
    assert done.returncode == 0 and done.stderr.startswith("warning: drafting is off: ")
    got = json.loads(done.stdout)
    assert [mode["draft_tokens"] for mode in got["modes"]] == [0]
    assert re.search(r"^- drafting is off: .*drafter.onnx: file is missing", text_report(got), re.MULTILINE)
    assert "drafter.onnx: file is missing" in html_report(got)


def test_notes_say_what_holds(result):
    timed = [{"threads": 1, "decode_s": 0.002, "verify_s": 0.003}, {"threads": 2, "decode_s": 0.001, "verify_s": None}]
    said = notes(result["modes"], 3, None, ["seems to pay", "drafting does not pay: verify"], 2, True, timed)
    assert (
        "auto drafted nothing of the bundle's drafter at the end of 2 of 3 repeats: drafting does not pay: verify"
        in said
    )
    assert any(note.startswith("2 prompts have other texts") for note in said)
    assert any(
        re.match(r"fastest on these prompts: draft tokens \w+, \d\.\d\d of plain decoding", note) for note in said
    )
    assert any("measure again when it is idle" in note for note in said)
    assert "threads tried: 1 (2.000 ms a token), 2 (1.000 ms a token); the fastest was taken" in said
    assert any(
        re.search(r"it had \d+ of \d+ drafts by mtp accepted and \d+ of \d+ drafts by ngram", note) for note in said
    )
    quiet = notes(result["modes"][:1], 3, None, [], 0, False, [])
    assert not any(
        "fastest" in note or "auto" in note or "the text is the same" in note or "idle" in note for note in quiet
    )


def test_threads_auto_measures_all_and_says_which_is_fastest(bundle_of, asked, capsys, monkeypatch):
    """The fastest is 1, for this process runs other tests with the same number."""
    times = {1: 0.2, 2: 0.4, 3: 0.3}
    checked = []

    def check(command, **options):
        checked.append(int(command[command.index("--threads") + 1]))
        costs = {"verify_s": {rows: {"low": times[checked[-1]]} for rows in ("1", "5")}}
        return SimpleNamespace(returncode=0, stdout=json.dumps(costs))

    monkeypatch.setattr(bench_threads, "subprocess", SimpleNamespace(run=check))
    monkeypatch.setattr("runtime_py.cpus.physical_cores", lambda: 3)
    arguments = ["bench", bundle_of("tiny"), *asked, "--repeats", 1, "--draft-tokens", 0, "--threads", "auto", "--json"]
    assert main([*map(str, arguments), "--backend", "onnx"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert (checked, got["threads"]) == ([1, 2, 3], 1)
    assert [entry["threads"] for entry in got["thread_candidates"]] == [1, 2, 3]
    assert "1 (fastest)" in html_report(got) and "2 (fastest)" not in html_report(got)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft-tokens", "0,17"], "--draft-tokens 17 is outside 0..16; "),
        (["--draft-tokens", "0,few"], "'few' is neither auto nor a number; see "),
        (["--draft-tokens", "1,1"], "'1,1' has a number twice; see "),
        (["--tokens", "1"], "--tokens 1 is below 2; "),
        (["--repeats", "0"], "--repeats 0 is below 1; "),
        (["--threads", "0"], "--threads 0 is outside 1..256; "),
        (["--threads", "all"], "'all' is neither auto nor a number; see "),
        (["--html", "/nowhere/report.html"], "--html /nowhere/report.html: no file can be made there; "),
        (["--html", "/tmp"], "--html /tmp: no file can be made there; "),
        (["--prompts", "/nowhere"], "--prompts /nowhere: cannot be read (No such file or directory); "),
        (["--tokens", "4000"], "4000 are to follow, the context holds 2048; "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_one_line(bundle_of, capsys, arguments, message):
    assert message in error_line(
        main, ["bench", bundle_of("tiny"), "--backend", "onnx", "--threads", 1, *arguments], capsys
    )


def test_what_is_no_bundle_is_one_line(tmp_path):
    for name in ("bench", "check"):
        assert "no manifest.json" in error_of(name, tmp_path)


# The report


@pytest.fixture(scope="module")
def page(result) -> str:
    return html_report(result)


def test_the_page_refers_to_nothing_outside(page):
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert not re.search(r"<(script|link|img|iframe|object|embed|base|form|video|audio)\b", page)
    assert not re.search(r"@import|\bsrc=|url\((?!#)|<!ENTITY|<\?xml|<!DOCTYPE (?!html>)", page)
    assert all(place.startswith("#") for place in re.findall(r'href="([^"]*)"', page))
    assert set(re.findall(r'https?://[^"\s<]+', page)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_ids_of_the_plots_do_not_meet(page):
    ids = Counter(re.findall(r'\bid="([^"]+)"', page))
    assert max(ids.values()) == 1
    assert {place[1:] for place in re.findall(r'(?:href="|url\()(#[^")]+)', page)} <= ids.keys()


def test_names_are_text_on_the_page(result):
    page = html_report({**result, "bundle": "<script>alert(1)</script>"})
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page


def test_a_report_of_plain_decoding_alone(result):
    page = html_report({**result, "modes": result["modes"][:1], "off_reason": "file is missing"})
    assert "nothing was drafted" in page


def test_what_was_measured_is_told_though_the_report_cannot_be_written(bundle_of, tmp_path):
    prompts = tmp_path / "one.jsonl"
    prompts.write_text('{"kind": "chat", "text": "ROMEO:"}\n')
    report = tmp_path / "full.html"
    report.symlink_to("/dev/full")
    options = ["--prompts", prompts, "--draft-tokens", "0", "--tokens", "2", "--repeats", "1", "--backend", "onnx"]
    done = run("bench", bundle_of("tiny"), *options, "--threads", 1, "--json", "--html", report)
    assert done.returncode == 2 and json.loads(done.stdout)["repeats"] == 1
    assert done.stderr.splitlines()[-1] == "error: [Errno 28] No space left on device"


def test_html_without_matplotlib_is_one_line(bundle_of, tmp_path):
    code = (
        "import importlib.util as util, sys; find = util.find_spec; "
        "util.find_spec = lambda name, *rest: None if name == 'matplotlib' else find(name, *rest); "
        "from runtime_py.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "bench", bundle_of("tiny"), "--html", tmp_path / "report.html"]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: matplotlib is not installed; --html needs pip install -e '.[bench]'\n"


MEASURE = """<script>document.addEventListener("DOMContentLoaded", () => {
  const boxes = [...document.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect());
  document.body.dataset.width = document.documentElement.scrollWidth + " of " + document.documentElement.clientWidth;
  document.body.dataset.boxes = boxes.map(box => box.width > 200 && box.height > 100).join();
});</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium; apt-get install chromium")
def test_the_page_in_a_browser(page, result, tmp_path):
    """Parsed and laid out by one: four plots of some size, every number in its table, nothing wider than the window."""
    policy = re.search(r"<meta http-equiv=[^>]*>", page)[0]
    (tmp_path / "page.html").write_text(page.replace(policy, MEASURE), encoding="utf-8")
    command = [CHROMIUM, *SWITCHES, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1000,900", "--dump-dom"]
    done = subprocess.run(
        [*command, (tmp_path / "page.html").as_uri()], capture_output=True, encoding="utf-8", timeout=120
    )
    dom = html.unescape(done.stdout)
    assert 'data-boxes="true,true,true,true"' in dom, done.stderr[-500:]
    wide, window = map(int, re.search(r'data-width="(\d+) of (\d+)"', dom).groups())
    assert wide <= window
    for title in ("Speed by draft tokens", "Acceptance per position", "Where the time goes", "Memory"):
        assert f">{title}</text>" in dom
    table = dom[dom.index('<table id="modes">') : dom.index("</table>")]
    assert table.count("<tr>") == 1 + len(result["modes"])
    assert f"<td>{result['modes'][1]['decode_tokens_per_second']['median']:.1f} (" in table
    assert result["probe"]["verdict"] in dom
    for note in result["notes"]:
        assert f"<li>{note}</li>" in dom
