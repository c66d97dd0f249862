"""Names on the Hugging Face hub, against a server in this process that speaks its endpoints."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from command import ROOT
from gguf_files import gguf_of
from huggingface_hub import constants
from tiny_gemma import make_assistant, make_target
from tokens import write_tokenizer

from kerngen.errors import CheckpointError, KerngenError, UsageError
from kerngen.runtime import hub
from kerngen.runtime.hub import HubName, find_cached, find_checkpoint, hub_name, require_checkpoint
from kerngen.runtime.session import load

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME, ASSISTANT = "google/gemma-4-tiny-it-qat-w4a16-ct", "google/gemma-4-tiny-it-assistant"


class Hub(ThreadingHTTPServer):
    """repos: files by name. answers: a status in place of what a repository would answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.answers: dict[str, tuple[int, str]] = {}
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repo = "/".join(parts[:2])
        if repo in self.server.answers:
            return self.say(*self.server.answers[repo])
        if repo not in self.server.repos:
            return self.say(404, "RepoNotFound")
        files = self.server.repos[repo]
        if api:
            return self.api(repo, files, parts[2:])
        if parts[2] != "resolve" or parts[3] not in ("main", COMMIT):
            return self.say(404, "RevisionNotFound")
        name = "/".join(parts[4:])
        if name not in files:
            return self.say(404, "EntryNotFound")
        data = files[name]
        self.reply(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def api(self, repo: str, files: dict[str, bytes], rest: list[str]) -> None:
        if len(rest) >= 2 and rest[1] not in ("main", COMMIT):
            return self.say(404, "RevisionNotFound")
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                for n, d in files.items()
            ]
            return self.reply(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        siblings = [{"rfilename": name} for name in files]
        info = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
        self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def say(self, status: int, code: str) -> None:
        self.reply(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def reply(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    root = tmp_path_factory.mktemp("hub")
    make_target(root / "target", "k_eq_v")
    write_tokenizer(root / "target")
    make_assistant(root / "assistant", "k_eq_v")
    more = {"README.md": b"#", "gemma.gguf": b"GGUF", "pytorch_model.bin": b"\x80", "consolidated.safetensors": b"x"}
    return {NAME: files_of(root / "target") | more, ASSISTANT: files_of(root / "assistant")}


@pytest.fixture
def server(checkpoints: dict[str, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    server.repos = {name: dict(files) for name, files in checkpoints.items()}
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = "/{repo_id}/resolve/{revision}/{filename}"  # the library joins the two when it is imported
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(("text", "want"), [
    ("google/gemma-4-31B-it", HubName("google/gemma-4-31B-it", None)),
    ("google/gemma-4-31B-it@v1.0", HubName("google/gemma-4-31B-it", "v1.0")),
    ("google/gemma-4-31B-it@refs/pr/3", HubName("google/gemma-4-31B-it", "refs/pr/3")), ("here/there", None),
    ("./google/gemma", None), ("/google/gemma", None), ("gemma", None), ("a/b/c", None), ("google/gem ma", None),
])  # fmt: skip
def test_what_is_a_name_on_the_hub(
    text: str, want: HubName | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()  # a path that may be meant, although nothing is there
    monkeypatch.chdir(tmp_path)
    assert hub_name(text) == hub_name(Path(text)) == want or text.startswith("./")


def test_only_what_is_needed_is_downloaded_and_that_once(server: Hub) -> None:
    assert find_cached(HubName(NAME, None)) is None
    folder = find_checkpoint(NAME)
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
              "chat_template.jinja"}  # fmt: skip
    assert {p.name for p in folder.iterdir()} == needed
    assert all((folder / name).read_bytes() == server.repos[NAME][name] for name in needed)
    assert not [a for a in server.asked if a.endswith((".gguf", ".bin", ".md", "consolidated.safetensors"))]
    server.asked.clear()
    assert find_checkpoint(f"{NAME}@main") == find_cached(HubName(NAME, None)) == folder
    assert not [a for a in server.asked if a.startswith("GET") and "/resolve/" in a]


def test_a_model_and_its_drafter_run_by_name(server: Hub) -> None:
    session = load(NAME, device="cpu")
    assert not session.drafter_folders, "a drafter that nobody asked for is not downloaded"
    text = session.generate("hello", max_new_tokens=6).text
    session = load(NAME, draft=ASSISTANT, device="cpu")
    assert session.generate("hello", max_new_tokens=6).text == text
    (drafter,) = session.drafter_folders
    assert drafter.is_relative_to(constants.HF_HUB_CACHE)
    assert load(NAME, device="cpu").drafter_folders == (drafter,), "what was downloaded is found"


def refused(name: str = NAME) -> KerngenError:
    with pytest.raises(KerngenError) as caught:
        find_checkpoint(name)
    assert "\n" not in caught.value.message
    return caught.value


def test_a_gated_model_says_what_to_accept(server: Hub) -> None:
    for status in (401, 403):
        server.answers[NAME] = (status, "GatedRepo")
        error = refused()
        assert isinstance(error, CheckpointError)
        assert f"{NAME} is gated: {server.url} gives it to those who accepted its licence" in error.message
        assert error.hint == f"accept it at {server.url}/{NAME}, then: hf auth login"


def test_a_model_that_is_not_there_or_private(server: Hub) -> None:
    error = refused("google/gemma-5")
    assert isinstance(error, UsageError)
    assert f"google/gemma-5 is not a folder here, and {server.url} has no such model, or not for you" in error.message
    assert error.hint == "check the spelling; a private one needs: hf auth login"
    server.answers[NAME] = (401, "RepoNotFound")
    assert "no such model, or not for you" in refused().message
    server.answers.clear()
    error = refused(f"{NAME}@v9")
    assert isinstance(error, UsageError)
    assert f"has {NAME}, but no revision v9" in error.message


def test_whether_a_model_is_there_is_asked_without_a_download(server: Hub) -> None:
    require_checkpoint(NAME)
    with pytest.raises(UsageError, match="no such model"):
        require_checkpoint("google/gemma-5")
    with pytest.raises(UsageError, match="nowhere is not a folder"):
        require_checkpoint("./nowhere")
    assert not [a for a in server.asked if "/resolve/" in a]
    find_checkpoint(NAME)
    server.asked.clear()
    require_checkpoint(NAME)
    assert not server.asked, "it was downloaded before"


def test_a_hub_that_fails_says_how(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers[NAME] = (500, "")
    assert f"{server.url} answered 500 when asked for {NAME}" in refused().message
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # discard: nobody listens there
    error = refused()
    assert f"{NAME} is not a folder here, and could not be downloaded from http://127.0.0.1:9" in error.message
    assert "hf download" in str(error.hint)


def test_without_a_network_the_cache_serves(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_checkpoint(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert find_checkpoint(NAME) == folder


def test_offline_is_obeyed(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = refused()
    assert error.message == f"{NAME} was not downloaded before, and HF_HUB_OFFLINE forbids it now"
    assert str(error.hint).startswith("unset it, or where there is a network: hf download")
    assert not server.asked


def test_a_server_that_stays_silent_is_given_up(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(Handler, "do_GET", lambda self: threading.Event().wait(2))
    assert "could not be downloaded" in refused().message


@pytest.mark.parametrize(("gone", "message"), [
    (("config.json",), "no config.json, but a GGUF file: gemma.gguf"),
    (("model.safetensors",), "no model.safetensors and no model.safetensors.index.json, but a GGUF file"),
    (
        ("model.safetensors", "gemma.gguf"),
        "no model.safetensors and no model.safetensors.index.json, but pickled weights: pytorch_model.bin",
    ),
])  # fmt: skip
def test_a_repository_of_another_format_is_not_downloaded(server: Hub, gone: tuple[str, ...], message: str) -> None:
    for name in gone:
        del server.repos[NAME][name]
    assert f"{server.url}/{NAME} holds {message}" in refused().message
    assert not [a for a in server.asked if "/resolve/" in a]


# ---- GGUF files ----------------------------------------------------------------------------------------------------

QUANTISED = "google/gemma-4-tiny-it-qat-q4_0-gguf"


@pytest.mark.parametrize(("text", "want"), [
    ("google/gemma-gguf/m-Q4_0.gguf", HubName("google/gemma-gguf", None, "m-Q4_0.gguf")),
    ("google/gemma-gguf@v1/m.gguf", HubName("google/gemma-gguf", "v1", "m.gguf")),
    ("google/gemma-gguf/BF16/m-00001-of-00002.gguf", HubName("google/gemma-gguf", None, "BF16/m-00001-of-00002.gguf")),
    ("google/gemma-gguf/../m.gguf", None), ("google/gemma-gguf/m.safetensors", None), ("/google/gemma/m.gguf", None),
])  # fmt: skip
def test_a_file_in_a_repository(text: str, want: HubName | None) -> None:
    assert hub_name(text) == want
    assert want is None or str(want) == text


def test_a_file_of_a_repository_runs_by_its_name(server: Hub, tmp_path: Path) -> None:
    make_target(tmp_path / "hf", "k_eq_v")
    write_tokenizer(tmp_path / "hf")
    parts = gguf_of(tmp_path / "hf", lambda *_: "F32").write_split(tmp_path / "m-F32", 2)
    tokenizer = (tmp_path / "hf" / "tokenizer.json").read_bytes()
    server.repos[QUANTISED] = {f"F32/{part.name}": part.read_bytes() for part in parts}
    server.repos[QUANTISED] |= {"F32/tokenizer.json": tokenizer, "m-Q8_0.gguf": b"GGUF", "README.md": b"#"}
    name = f"{QUANTISED}/F32/{parts[0].name}"
    assert find_cached(HubName(QUANTISED, None, f"F32/{parts[0].name}")) is None
    place = find_checkpoint(name)
    assert {p.name for p in place.parent.iterdir()} == {"tokenizer.json", *(part.name for part in parts)}
    assert not (place.parent.parent / "m-Q8_0.gguf").exists()
    session = load(name, device="cpu")
    want = load(tmp_path / "hf", device="cpu").encode("hello", chat=False)
    assert session.encode("hello", chat=False) == want
    assert not session.drafter_folders
    server.repos["google/gemma-4-tiny-it-assistant"] = server.repos[ASSISTANT]
    assert not load(name, device="cpu").drafter_folders, "nobody asked for it"
    drafter = find_checkpoint("google/gemma-4-tiny-it-assistant")
    assert load(name, device="cpu").drafter_folders == (drafter,)


def test_which_files_a_repository_has_is_said(server: Hub) -> None:
    server.repos[QUANTISED] = {"a-Q4_0.gguf": b"GGUF", "b-Q8_0.gguf": b"GGUF"}
    error = refused(QUANTISED)
    assert "holds no config.json, but a GGUF file: a-Q4_0.gguf" in error.message
    assert error.hint == f"name the file: {QUANTISED}/a-Q4_0.gguf, {QUANTISED}/b-Q8_0.gguf"
    error = refused(f"{QUANTISED}/c.gguf")
    assert error.message.endswith(f"/{QUANTISED} has no c.gguf")
    assert error.hint == "it has: a-Q4_0.gguf, b-Q8_0.gguf"


def test_run_by_name_and_offline_through_the_environment(server: Hub, tmp_path: Path) -> None:
    """The program, with nothing but the hub's own variables set."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable, "-m", "kerngen", "run", NAME, "--prompt", "hi", "--device", "cpu", "--max-new-tokens", "2",
    ]  # fmt: skip
    online = subprocess.run(command, env=env, capture_output=True, text=True)
    assert online.returncode == 0, online.stderr
    server.asked.clear()
    again = subprocess.run(command, env=env | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert (again.returncode, again.stdout) == (0, online.stdout)
    assert not server.asked
