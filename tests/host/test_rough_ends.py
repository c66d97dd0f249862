"""Commands that are killed, homes that cannot be written, links in the way, and a hundred clients that read slowly."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from command import Kerngen
from served import served
from test_tuning_db import H200, add_build, key_of, measured

from kerngen.arch import Target
from kerngen.tuning_db import Store
from kerngen.tuning_db.dist.export import Selection, export
from kerngen.tuning_db.dist.keys import user_key

TUNE = ("tune", "--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "embed", "--jobs", "1", "--trials", "2")


def _rows(path: Path) -> set[str]:
    """The ids of what is committed."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as c:
            return {id for table in ("measurement", "build") for (id,) in c.execute(f"SELECT id FROM {table}")}
    except sqlite3.OperationalError:  # not there yet
        return set()


def _until(is_so: Callable[[], bool], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_tune_that_is_killed_loses_nothing(kerngen: Kerngen) -> None:
    """What was committed stays, whole; the next one goes on there and finishes."""
    path = kerngen.folder / "tuning.db"
    started = subprocess.Popen([sys.executable, "-m", "kerngen", *TUNE],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        _until(lambda: bool(_rows(path)) or started.poll() is not None)
        kept = _rows(path)
    finally:
        started.kill()
        started.wait()
    assert kept
    assert kept <= _rows(path)
    told = json.loads(kerngen("db", "verify", str(path), "--json")[1])
    assert [v["ok"] for v in told["verdicts"][:2]] == [True, True], told
    done = json.loads(kerngen.ok(*TUNE, "--json"))
    assert kept <= _rows(path)
    with Store.open(path, read_only=True) as store:
        assert len(store.winners()) == len(done["results"])


def test_a_home_that_cannot_be_written(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc stands for it, where root cannot make a folder either: commands do their work, or say what they need."""
    for name in ("KERNGEN_CACHE_DIR", "KERNGEN_DB", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/kerngen")
    small = ("--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "embed")
    for command in (("doctor",), ("kernel", "ls"), ("db", "trust", "--list"), ("db", "install", "--list"),
                    ("tune", *small, "--trials", "1", "--jobs", "1", "--db", "mine.db")):  # fmt: skip
        code, _, err = kerngen(*command)
        assert code == 0, (command, err)
    for command, says in (
        (("compile", *small), "another cache with KERNGEN_CACHE_DIR"),
        (("tune", *small), "--db or KERNGEN_DB"),
        (("db", "keygen"), "No such file or directory"),
    ):
        code, _, err = kerngen(*command)
        assert code == 1, (command, err)
        assert says in err
        assert "Traceback" not in err
    code, _, err = kerngen("db", "export", "--db", "mine.db", "-o", "x.kgdb")
    assert (code, "not signed: /proc/kerngen/" in err) == (0, True), "it says that there is no key"
    assert not (kerngen.folder / "~").exists()


def test_links_where_databases_come_in_and_releases_go_out(kerngen: Kerngen) -> None:
    """What comes in may be a link; what is written replaces a link and leaves alone what it leads to."""
    with Store.open("theirs.db") as store:
        store.add_measurement(measured(add_build(store), 0, 10.0))
        store.recompute_winners("toy", key_of().static_key, Target.of(H200))
        export([store], Selection(), Path("theirs.kgdb"), keys=[user_key()])
    Path("in.kgdb").symlink_to("theirs.kgdb")
    Path("loop.kgdb").symlink_to("loop.kgdb")
    Path("gone.kgdb").symlink_to("nowhere.kgdb")
    Path("endless.kgdb").symlink_to("/dev/zero")
    kerngen.ok("db", "import", "in.kgdb")
    kerngen.ok("db", "install", "in.kgdb")
    installed = next((kerngen.folder / ".local/share/kerngen/bundles").glob("*.kgdb"))
    assert not installed.is_symlink()
    for name in ("loop", "gone", "endless"):
        for command in ("import", "install", "verify"):
            code, _, err = kerngen("db", command, f"{name}.kgdb")
            assert code == 1, err
            assert "Traceback" not in err
    victim = Path("victim.kgdb")
    shutil.copyfile("theirs.kgdb", victim)
    before = victim.read_bytes()
    out = Path("dist")
    out.mkdir()
    (out / "kerngen-sm90.kgdb").symlink_to(victim.resolve())
    kerngen.ok("release", "-o", "dist", "--arch", "sm90", "--model", "gemma-4-31b", "--kernel", "gelu_gate",
               "--jobs", "1")  # fmt: skip
    Path("out.kgdb").symlink_to(victim)
    kerngen.ok("db", "export", "--db", "theirs.kgdb", "-o", "out.kgdb")
    for written in (out / "kerngen-sm90.kgdb", Path("out.kgdb")):
        assert not written.is_symlink()
        kerngen.ok("db", "verify", str(written))
    assert victim.read_bytes() == before


def test_a_hundred_slow_readers_and_an_end_on_sigterm() -> None:
    """Others are answered meanwhile; told to end, it sends each of them the rest of its answer first."""
    asked = {"prompt": "The", "max_tokens": 16, "ignore_eos": True, "temperature": 0}
    body = json.dumps(asked | {"stream": True}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    with served("--no-draft", "--max-queue", "200") as found:
        host, _, port = found.url.removeprefix("http://").partition(":")
        alone = found.http.post(f"{found.url}/v1/completions", json=asked).json()["choices"][0]["text"]
        slow = []
        for _ in range(100):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            client.settimeout(120)
            client.connect((host, int(port)))
            client.sendall(b"%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body))
            slow.append(client)
        _until(lambda: found.metric("num_requests_waiting") > 20)
        started = time.monotonic()
        assert found.http.get(f"{found.url}/health").status_code == 200
        assert time.monotonic() - started < 10
        assert found.http.post(f"{found.url}/v1/completions", json=asked).json()["choices"][0]["text"] == alone
        for client in slow:  # again, so that many are well under way
            assert client.recv(16).startswith(b"HTTP/1.1 200")
        found.process.send_signal(signal.SIGTERM)
        for client in slow:
            with client:
                parts = []
                while part := client.recv(512):
                    parts.append(part)
            told = b"".join(parts)
            assert b"data: [DONE]" in told
            chunks = [json.loads(line[6:]) for line in told.decode().splitlines() if line.startswith("data: {")]
            assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == alone
        assert found.process.wait(60) == 0
        assert "Traceback" not in "".join(found.said)
