"""The Android app without its screens, in a JVM: the engine with its thread, import, settings, memory, benchmark. Graphs are held
by a Python process as in test_android_core.py, or, where they are here, run by onnxruntime's Java API itself."""

import shutil
import sys
from pathlib import Path

import pytest

from runtime_py import manifest as contract
from runtime_py.loading import load
from runtime_py.sampling import Sampling
from runtime_py.session import Session, Settings

from .android_natives import CLASSES, link_natives, needs_natives
from .edits import edit_json
from .jvm import CORE, ROOT, Jvm, Refused, compile_java, needs_jdk

APP = ROOT / "android_demo/app"
PLENTY = 1 << 40
GREEDY = {"temperature": "0"}


def start(classes: Path, natives: Path | None = None) -> Jvm:
    machine = Jvm(classes, main="AppTests", natives=natives)
    machine.python = None if natives else sys.executable
    return machine


@pytest.fixture(scope="module")
def app(made_once):
    machine = start(made_once("java app", lambda out: compile_java(out, [CORE, APP / "plain", APP / "test"])))
    yield machine
    machine.close()


@pytest.fixture(scope="module")
def app_on_onnxruntime(made_once):
    folders = [CORE, APP / "plain", APP / "onnxruntime", APP / "test"]
    classes = made_once("java app, onnxruntime", lambda out: unpack_and_compile(out, folders))
    machine = start(classes, made_once("natives", link_natives) if classes else None)
    yield machine
    machine.close()


def unpack_and_compile(out: Path, folders: list[Path]) -> None:
    shutil.unpack_archive(CLASSES, out, "zip")
    compile_java(out, folders, (CLASSES,))


def open_bundle(
    app: Jvm,
    bundle: Path,
    available: int = PLENTY,
    heap: int = PLENTY,
    force: bool = False,
    at_once: str = "",
    **fields: str,
) -> dict:
    given = {"context": "400", "threads": "1", **fields}
    memory = {"available": available, "heap": heap, "force": force}
    return app.ask("load", bundle=str(bundle), python=app.python, fields=given, at_once=at_once, **memory)


def send(app: Jvm, message: str, seed: int = 3, leave_after: int = 1 << 30, at_once: str = "", **fields: str) -> dict:
    given = {"context": "400", "threads": "1", **fields}
    return app.ask("send", message=message, seed=seed, leave_after=leave_after, at_once=at_once, fields=given)


def replies(bundle: Path, messages: list[str], sampling: Sampling) -> list[str]:
    session, history, texts = Session(load(bundle, 1, 0, backend="onnx"), 400), [], []
    for message in messages:
        history.append({"role": "user", "content": message})
        reply = session.chat(history, Settings(sampling=sampling))
        history.append(reply.message())
        texts.append(reply.text)
    return texts


# Conversations


@needs_jdk
@pytest.mark.parametrize("drafting", ["auto", "fixed", "off"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(True, 0.9, 20, 0.9, seed=3)], ids=["greedy", "sampled"])
def test_a_conversation_is_that_of_the_runtime(bundle_of, app, drafting, sampling):
    heat = str(sampling.temperature if sampling.do_sample else 0)
    fields = {
        "drafting": drafting,
        "temperature": heat,
        "top_k": str(sampling.top_k or 0),
        "top_p": str(sampling.top_p),
    }
    opened = open_bundle(app, bundle_of("tiny"))
    assert opened["failure"] is None and opened["chats"] and opened["off_reason"] is None
    said = ["Good morrow, my lord.", "What news?"]
    told = [send(app, message, **fields) for message in said]
    expected = replies(bundle_of("tiny"), said, sampling)
    assert [answer["transcript"][-1] for answer in told] == expected
    assert told[-1]["transcript"] == [f"> {said[0]}", expected[0], f"> {said[1]}", expected[1]]
    assert told[0]["drafts"] or drafting == "off"
    assert ("switched off" in (told[0]["draft_off"] or "")) == (drafting == "off")


@needs_jdk
@needs_natives
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_onnxruntime_in_java(bundle_of, app_on_onnxruntime, dtype):
    """The app's own graphs. Plain and drafted texts are one; the version is another than Python's, so that its text may leave
    Python's in a near tie: the first tokens are compared."""
    app, texts = app_on_onnxruntime, []
    for drafting in ("off", "fixed", "auto"):
        opened = open_bundle(app, bundle_of("tiny", "int8", "onnx", dtype))
        assert opened["failure"] is None and opened["off_reason"] is None and opened["threads"] == 1
        answer = send(app, "Good morrow, my lord.", drafting=drafting, **GREEDY)
        assert answer["failure"] is None and answer["open"] == 1
        assert answer["drafts"] == (drafting != "off")
        texts.append(answer["transcript"][-1])
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) > 40
    (expected,) = replies(bundle_of("tiny", "int8", "onnx", dtype), ["Good morrow, my lord."], Sampling())
    assert texts[0][:12] == expected[:12]


@needs_jdk
@needs_natives
def test_onnxruntime_refuses_in_a_sentence(bundle_of, app_on_onnxruntime, tmp_path):
    bundle = Path(shutil.copytree(bundle_of("tiny"), tmp_path / "bundle"))
    file = bundle / "onnx/self_decoder.onnx"
    file.write_bytes(bytes(file.stat().st_size))
    refused = open_bundle(app_on_onnxruntime, bundle)
    assert refused["failure"] == "SENTENCE" and "onnxruntime cannot load it" in refused["detail"]
    assert refused["loaded"] is None and refused["open"] == 0
    shutil.copy(bundle_of("tiny") / "onnx/self_decoder.onnx", file)
    edit_json(bundle / "manifest.json", {"graphs/self_decoder/outputs/0/shape": ["T", 77]})
    assert "not those of the manifest" in open_bundle(app_on_onnxruntime, bundle)["detail"]


@needs_jdk
def test_an_answer_is_stopped_and_a_new_chat_begins(bundle_of, app):
    open_bundle(app, bundle_of("tiny"))
    whole = send(app, "Good morrow.", **GREEDY)["transcript"][-1]
    app.ask("new chat")
    stopped = send(app, "Good morrow.", leave_after=1, **GREEDY)
    assert stopped["stop_reason"] in ("cancelled", "stop") and whole.startswith(stopped["transcript"][-1])
    assert app.ask("new chat")["transcript"] == []
    assert send(app, "Good morrow.", **GREEDY)["transcript"][-1] == whole


@needs_jdk
def test_a_context_that_is_full(bundle_of, app):
    open_bundle(app, bundle_of("tiny"), context="64")
    said = []
    for _ in range(8):
        answer = send(app, "Good morrow, my lord. What news from the court today?", **GREEDY)
        if answer["failure"]:
            break
        said = answer["transcript"]
    assert answer["failure"] == "SENTENCE" and "the context holds 64; shorten the prompt" in answer["detail"]
    assert answer["transcript"] == said != [], "what was refused is no part of the conversation"


@needs_jdk
def test_what_does_not_fit_is_told_with_numbers(bundle_of, app):
    refused = open_bundle(app, bundle_of("tiny"), available=1_000_000)
    assert refused["failure"] == "DOES_NOT_FIT" and "against 1.0 MB available" in refused["detail"]
    assert refused["loaded"] is None and refused["open"] == 0
    assert open_bundle(app, bundle_of("tiny"), available=1_000_000, force=True)["failure"] is None
    small = open_bundle(app, bundle_of("tiny"), heap=1000)
    assert small["failure"] == "SENTENCE" and "an app may have 0.0 MB here; set a smaller context" in small["detail"]


@needs_jdk
def test_a_drafter_that_is_missing_only_turns_drafting_off(bundle_of, app, tmp_path):
    bundle = Path(shutil.copytree(bundle_of("tiny"), tmp_path / "bundle"))
    (bundle / "onnx/drafter.onnx").unlink()
    opened = open_bundle(app, bundle)
    assert "drafter.onnx: file is missing" in opened["off_reason"]
    answer = send(app, "Good morrow.", **GREEDY)
    assert answer["draft_off"] == opened["off_reason"] and not answer["drafts"] and answer["transcript"][-1]


@needs_jdk
def test_a_bundle_that_does_not_load(app, tmp_path):
    refused = open_bundle(app, tmp_path / "nothing")
    assert refused["failure"] == "SENTENCE" and "no such folder" in refused["detail"] and refused["loaded"] is None


@needs_jdk
@pytest.mark.parametrize("left", ["stop", "close"])
def test_a_bundle_that_is_left_while_it_loads_is_let_go(bundle_of, app, left):
    opened = open_bundle(app, bundle_of("tiny"), at_once=left)
    assert opened["loaded"] is None and opened["failure"] is None and opened["heard"][-1] == "rests"
    assert send(app, "Good morrow.", **GREEDY)["transcript"] == []
    assert open_bundle(app, bundle_of("tiny"))["open"] == 1


@needs_jdk
def test_a_stop_before_the_engine_has_begun_is_kept(bundle_of, app):
    open_bundle(app, bundle_of("tiny"))
    stopped = send(app, "Good morrow. " * 20, at_once="stop", **GREEDY)
    assert stopped["stop_reason"] == "cancelled" and stopped["transcript"][-1] == ""


@needs_jdk
def test_a_benchmark_that_is_left_shows_nothing(bundle_of, app):
    open_bundle(app, bundle_of("tiny"))
    told = app.ask("benchmark", prompts=["ROMEO:"], tokens=8, repeats=1, at_once="close")
    assert told["loaded"] is None and told["failure"] is None and "runs" not in told


@needs_jdk
def test_an_error_of_the_device_is_told_and_ends_nothing(bundle_of, app):
    told = open_bundle(app, bundle_of("tiny"), available=-1)
    assert told["failure"] == "UNEXPECTED" and "no such service" in told["detail"] and told["loaded"] is None
    assert open_bundle(app, bundle_of("tiny"))["failure"] is None


@needs_jdk
def test_a_closed_engine_frees_its_graphs(bundle_of, app):
    assert open_bundle(app, bundle_of("tiny"))["open"] == 1
    app.ask("close")
    assert open_bundle(app, bundle_of("tiny"))["open"] == 1


@needs_jdk
def test_benchmark(bundle_of, app):
    open_bundle(app, bundle_of("tiny"))
    told = app.ask("benchmark", prompts=["ROMEO:", "KING:"], tokens=24, repeats=2)
    assert told["failure"] is None and told["same_texts"] and told["runs"] == [4, 4]
    assert told["tokens_per_round"][0] == 1 and told["acceptance"][0] == 0
    assert told["speeds"] == sorted(told["speeds"]) and told["speeds"][0] > 0
    assert told["heard"][-2].endswith("12/12")


# Import


def bring(app: Jvm, source: Path, root: Path, leave_after: int = 1 << 30) -> dict:
    fields = {"context": "400", "threads": "1"}
    return app.ask("import", source=str(source), root=str(root), fields=fields, leave_after=leave_after)


@needs_jdk
def test_import(bundle_of, app, tmp_path):
    source = bundle_of("tiny")
    open_bundle(app, source)  # with memory enough, and graphs held by Python
    told = bring(app, source, tmp_path)
    assert told["failure"] is None and told["loaded"] == str(tmp_path / "tiny-int8")
    manifest = contract.load(tmp_path / "tiny-int8")
    for name in manifest.files:
        assert (tmp_path / "tiny-int8" / name).read_bytes() == (source / name).read_bytes()
    assert app.ask("bundles", root=str(tmp_path)) == [str(tmp_path / "tiny-int8")]
    assert bring(app, source, tmp_path)["failure"] is None, "the one of this name is replaced"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-int8"]


@needs_jdk
@pytest.mark.parametrize("damage", ["missing", "cut", "longer", "flipped", "no manifest", "too large"])
def test_import_of_a_damaged_folder_leaves_nothing(bundle_of, app, tmp_path, damage):
    source = Path(shutil.copytree(bundle_of("tiny"), tmp_path / "source"))
    file, root = source / "embeddings/per_layer.bin", tmp_path / "root"
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "no manifest":
        (source / "manifest.json").unlink()
    elif damage == "too large":
        edit_json(source / "manifest.json", {"files/tokenizer.json": {"sha256": "", "size_bytes": 10**15}})
    else:
        file.write_bytes(
            {"cut": whole[:-1], "longer": whole + b"\0", "flipped": whole[:-1] + bytes([whole[-1] ^ 1])}[damage]
        )
    told = bring(app, source, root)
    words = {
        "missing": "per_layer.bin: is not in the folder",
        "cut": "fewer than the",
        "longer": "has more than the",
        "flipped": "the file is corrupt",
        "no manifest": "manifest.json: is not in the folder",
        "too large": "free; make room",
    }
    assert told["failure"] == "SENTENCE" and words[damage] in told["detail"]
    assert list(root.iterdir()) == []


@needs_jdk
def test_import_is_given_up(bundle_of, app, tmp_path):
    source = Path(shutil.copytree(bundle_of("tiny"), tmp_path / "source"))
    told = bring(app, source, tmp_path / "root", leave_after=1)
    assert told["failure"] is None
    assert [path.name for path in (tmp_path / "root").iterdir()] in ([], ["tiny-int8"]), "all or nothing"


@needs_jdk
def test_what_an_import_that_is_stopped_at_its_end_has_copied_is_not_loaded(bundle_of, app, tmp_path):
    app.ask("close")
    fields = {"context": "400", "threads": "1"}
    source, root = str(bundle_of("tiny")), str(tmp_path)
    told = app.ask("import", source=source, root=root, fields=fields, leave_at_end=True)
    assert told["failure"] is None and told["loaded"] is None
    assert [path.name for path in tmp_path.iterdir()] in ([], ["tiny-int8"]), "all or nothing"


@needs_jdk
def test_a_long_name_is_cut(bundle_of, app, tmp_path):
    source = Path(shutil.copytree(bundle_of("tiny"), tmp_path / "source"))
    edit_json(source / "manifest.json", {"name": "n" * 300})
    assert bring(app, source, tmp_path / "root")["failure"] is None
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["n" * 100]


@needs_jdk
def test_a_bundle_is_deleted(bundle_of, app, tmp_path):
    folder = Path(shutil.copytree(bundle_of("tiny"), tmp_path / "gone"))
    assert app.ask("delete", folder=str(folder))["failure"] is None and not folder.exists()


@needs_jdk
def test_files_of_other_backends_are_not_needed(bundle_of, app, tmp_path):
    bundle = Path(shutil.copytree(bundle_of("tiny"), tmp_path / "bundle"))
    ours = app.ask("files", bundle=str(bundle))
    changes: dict = {"files/executorch~drafter.pte": {"sha256": "", "size_bytes": 1}}
    changes["graphs/drafter/files"] = {"onnx": "onnx/drafter.onnx", "executorch": "executorch~drafter.pte"}
    edit_json(bundle / "manifest.json", changes)
    assert app.ask("files", bundle=str(bundle)) == ours == list(contract.load(bundle_of("tiny")).files)


# Settings


@needs_jdk
def test_settings_that_are_left_empty_are_the_bundle_s(bundle_of, app):
    spec = contract.load(bundle_of("tiny")).sampling
    told = app.ask("settings", bundle=str(bundle_of("tiny")), fields={"temperature": " ", "top_p": ""})
    assert told["drafting"] == "auto" and told["context"] == 4096 and told["threads"] >= 1
    assert (told["top_k"], told["top_p"]) == (spec.top_k, spec.top_p)
    assert told["temperature"] == (spec.temperature if spec.do_sample else 0)
    chosen = app.ask(
        "settings", bundle=str(bundle_of("tiny")), fields={"temperature": "0,5", "threads": "3", "top_k": "7"}
    )
    assert (chosen["temperature"], chosen["threads"], chosen["top_k"]) == (0.5, 3, 7)


@needs_jdk
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", "hot", "temperature is hot; give a number"),
        ("temperature", "-1", "temperature is -1.0; it must be at least 0"),
        ("temperature", "1f", "temperature is 1f; give a number"),
        ("temperature", "0x1p1", "temperature is 0x1p1; give a number"),
        ("temperature", "NaN", "temperature is NaN; give a number"),
        ("top_p", "0", "top_p is 0.0; it must be above 0"),
        ("top_k", "1.5", "top_k is 1.5; give a whole number"),
        ("threads", "0", "threads is 0; give a whole number from 1 to 256"),
        ("draft_tokens", "17", "draft_tokens is 17; give a whole number from 1 to 16"),
        ("context", "99999999999999999999", "context is 99999999999999999999; give a whole number"),
        ("drafting", "maybe", "drafting is maybe; give one of"),
    ],
)
def test_settings_that_cannot_be(bundle_of, app, field, value, words):
    with pytest.raises(Refused, match=words):
        app.ask("settings", bundle=str(bundle_of("tiny")), fields={field: value})
