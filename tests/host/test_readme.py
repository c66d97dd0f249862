"""What docs/quick-start.md tells a newcomer without a GPU to type works as it is printed: in a shell, on a terminal."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import ROOT, Kerngen
from terminal import Terminal
from test_docs import _why_wrong

PAGE = ROOT / "docs" / "quick-start.md"
SECTION = PAGE.read_text().partition("\n## Without a GPU or a download\n")[2].partition("\n## ")[0]
SHELL = "newcomer: "  # its prompt
CHAT = ">"  # its prompt
# In place of the openai package where that is not installed: the page's two calls, and what it reads of the answer.
STUB = """
import json, urllib.request
from types import SimpleNamespace

class OpenAI:
    def __init__(self, *, base_url, api_key):
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))
        self._url, self._headers = base_url + "/chat/completions", {"Authorization": f"Bearer {api_key}"}

    def _create(self, *, model, messages, stream):
        body = json.dumps({"model": model, "messages": messages, "stream": stream}).encode()
        for line in urllib.request.urlopen(urllib.request.Request(self._url, body, self._headers)):
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                yield SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(
                    content=choice["delta"].get("content"))) for choice in chunk["choices"]])
"""


def _block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kerngen: Kerngen) -> Iterator[Terminal]:
    """In a folder that holds what the page's lines name: the examples, and the environment that runs this test."""
    environment = Path(sys.prefix)
    if not all((environment / "bin" / name).exists() for name in ("activate", "kerngen")):
        pytest.skip(f"{environment} is no environment with the kerngen command in it, as make test makes one")
    (tmp_path / ".venv").symlink_to(environment)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("PS1", SHELL)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with Terminal("--norc", "--noprofile", "-i", program=["bash"]) as terminal:
        terminal.until(SHELL)
        yield terminal


def test_a_newcomer_s_lines_work_as_printed(shell: Terminal, tmp_path: Path) -> None:
    activate, ask, chat, serve = re.findall(r"^\$ (.*)$", _block("console"), re.MULTILINE)
    shell.type(f"{activate}\n")
    shell.until(SHELL)
    shell.type(f"{ask}\n")
    assert "A warp is" in shell.until("computed by PyTorch", "command not found")
    shell.until(SHELL)
    shell.type(f"{chat}\n")
    shell.until_last(CHAT)
    shell.type("What is a warp?\n")
    assert "A warp is" in shell.until(" in context\n")
    shell.until_last(CHAT)
    shell.type("/exit\n")
    shell.until(SHELL)
    shell.type(f"{serve}\n")
    said = shell.until("Ctrl-C ends it\n", "already in use")
    if is_taken := said.endswith("in use"):  # by somebody else's server: as printed, but for the port
        shell.until(SHELL)
        shell.type(f"{re.sub(r'  +#.*', '', serve)} --port 0\n")
        said = shell.until("Ctrl-C ends it\n")
    (url,) = re.findall(r" at (http://127\.0\.0\.1:\d+) ", said)
    printed = "http://127.0.0.1:8000"
    assert is_taken or url == printed
    assert f"{printed}," in serve
    with urllib.request.urlopen(f"{url}/", timeout=30) as page:
        assert page.headers["Content-Type"].startswith("text/html")
        assert b"<!DOCTYPE html>" in page.read()

    client = _block("python")
    assert f'"{printed}/v1"' in client
    paths = [os.environ["PYTHONPATH"]]
    if importlib.util.find_spec("openai") is None:
        (tmp_path / "stub").mkdir()
        (tmp_path / "stub" / "openai.py").write_text(STUB)
        paths.append(str(tmp_path / "stub"))
    done = subprocess.run(
        [sys.executable, "-c", client.replace(printed, url)], env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("A warp is"), done.stdout
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as metrics:
        assert re.search(r'^vllm:request_success_total\{.*"stop".*\} 1', metrics.read().decode(), re.MULTILINE)
    shell.type("\x03")
    assert "starting" not in shell.until(SHELL), "no bar is drawn under a server that serves"
    shell.type("exit $?\n")
    assert shell.end() == 0


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize("target", ["demo", "lint", "docs"])
def test_make_says_what_it_does_before_it_installs(target: str, tmp_path: Path) -> None:
    """pip takes minutes and is quiet; the demo's commands are understood, and drafts of a fixed length."""
    done = subprocess.run(["make", "--dry-run", target, f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True,
                          check=True)  # fmt: skip
    lines = done.stdout.replace("\\\n", " ").splitlines()
    (at,) = [n for n, line in enumerate(lines) if "pip install" in line]
    assert lines[at - 1].startswith('echo "installing kerngen')
    commands = [shlex.split(line)[1:] for line in lines if line.startswith(f"{tmp_path}/bin/kerngen ")]
    assert not [args for args in commands if _why_wrong(args) is not None]
    if target == "demo":
        assert [args[0] for args in commands] == ["doctor", "tune", "db", "run", "run"]
        assert "--num-draft-tokens" in commands[-2]
