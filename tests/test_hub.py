"""Checkpoints by hub id: a stub of the hub on the loopback serves a random pair under the official ids. The default
command line downloads both and records their commits; every failure of the network is one line and exit code 2."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from export.__main__ import main
from runtime_py import manifest as contract
from runtime_py.files import sha256
from runtime_py.loading import load

from .edits import error_line
from .pairs import PairShape

SHAPE = PairShape(layers=4, period=2, shared=2, intermediate=64)
IDS = ("google/gemma-4-E2B-it", "google/gemma-4-E2B-it-assistant")


def digest(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


@dataclass
class Hub:
    """Repositories by id. failure: what to do instead of an answer. asked: the paths of all requests."""

    folders: dict[str, Path]
    failure: str | None = None
    asked: list[str] = field(default_factory=list)
    endpoint: str = ""

    def commit(self, repository: str) -> str:
        return digest(repository)


class Handler(BaseHTTPRequestHandler):
    """What huggingface_hub.snapshot_download asks for: the revision, the tree, and each file by HEAD and GET."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.asked.append(path)
        api = path.startswith("api/models/")
        owner, name, action, _, *rest = [*path.removeprefix("api/models/").split("/"), *[""] * 4]
        repository = f"{owner}/{name}"
        if repository not in self.hub.folders:
            return self.refuse(404, "RepoNotFound", "Repository not found")
        if self.hub.failure == "gated" and not api:
            return self.refuse(403, "GatedRepo", "Access to this model is restricted")
        if self.hub.failure == "broken":
            return self.refuse(500, "", "")
        if api and action == "revision":
            return self.reply(json.dumps({"id": repository, "sha": self.hub.commit(repository)}).encode())
        folder = self.hub.folders[repository]
        if api:
            return self.reply(json.dumps([self.entry(file) for file in sorted(folder.iterdir())]).encode())
        return self.send_file(folder / "/".join(rest).strip("/"), self.hub.commit(repository))

    do_HEAD = do_GET

    def entry(self, file: Path) -> dict:
        return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": digest(file.name)}

    def send_file(self, file: Path, commit: str) -> None:
        if not file.is_file():
            return self.refuse(404, "EntryNotFound", "Entry not found")
        headers = {"ETag": f'"{digest(file.name)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        return self.reply(file.read_bytes(), headers, cut=self.hub.failure == "cut" and file.suffix == ".safetensors")

    def refuse(self, status: int, code: str, message: str) -> None:
        self.reply(b"", {"X-Error-Code": code, "X-Error-Message": message}, status)

    def reply(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = cut


@pytest.fixture
def hub(pair_of) -> Iterator[Hub]:
    hub = Hub(dict(zip(IDS, pair_of(SHAPE), strict=True)))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    yield hub
    server.shutdown()
    server.server_close()


@pytest.fixture
def through(hub, monkeypatch, tmp_path) -> Hub:
    """This process asks the stub, with an empty cache and no waiting between retries."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    return hub


def export(hub: Hub, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "export", *arguments, "--out", str(tmp_path / "bundle")]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_default_export_downloads_the_official_ids(hub, tmp_path):
    """Small files first, and looks at them: the stub's pair has another size."""
    result = export(hub, tmp_path, "e2b")
    assert result.returncode == 2 and "hidden_size is 64, e2b has 1536: use custom" in result.stderr
    assert all(f"{repository}/resolve/{hub.commit(repository)}/config.json" in hub.asked for repository in IDS)
    assert not any("safetensors" in path for path in hub.asked)


def test_a_bundle_from_ids_names_their_commits(hub, tmp_path):
    result = export(hub, tmp_path, "custom", "--checkpoint", IDS[0], "--drafter", IDS[1])
    assert result.returncode == 0, result.stderr
    manifest = contract.load(tmp_path / "bundle")
    assert manifest.name == "custom"
    for who, repository in zip(("target", "drafter"), IDS, strict=True):
        spec = manifest.checkpoints[who]
        assert (spec.source, spec.revision) == (repository, hub.commit(repository))
        folder = hub.folders[repository]
        assert spec.files == {
            name: sha256(folder / name) for name in ("config.json", "generation_config.json", "model.safetensors")
        }
    assert load(tmp_path / "bundle", threads=1).off_reason is None


@pytest.mark.parametrize(
    ("failure", "parts"),
    [
        ("missing", ["404", "check the id"]),
        ("gated", ["403", "HF_TOKEN"]),
        ("broken", ["500", "your network"]),
        ("cut", ["peer closed connection"]),
        ("down", ["Connection refused"]),
    ],
)
def test_failures_are_one_line(through, failure, parts, tmp_path, monkeypatch, capsys):
    through.failure = failure
    if failure == "missing":
        through.folders.clear()
    if failure == "down":
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    command = ["custom", "--checkpoint", IDS[0], "--drafter", IDS[1], "--out", tmp_path / "bundle"]
    line = error_line(main, command, capsys)
    assert all(part in line for part in [IDS[0], "cannot be downloaded", *parts]), line
    assert not (tmp_path / "bundle").exists()


def test_a_missing_drafter_is_named(through, tmp_path, capsys):
    del through.folders[IDS[1]]
    line = error_line(main, ["e2b", "--out", tmp_path / "bundle"], capsys)
    assert f"checkpoint '{IDS[1]}' cannot be downloaded" in line and not (tmp_path / "bundle").exists()
