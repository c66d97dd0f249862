"""Bad input through the real command line: one clear message on stderr, the right exit code, nothing half-written."""

from __future__ import annotations

import os
import re
import socket
import sqlite3
from pathlib import Path

import pytest
from command import ROOT, Kerngen
from sheets import measured_sheets

from kerngen.errors import DatabaseError
from kerngen.tuning_db import Store
from kerngen.tuning_db.read import places
from kerngen.tuning_db.read.files import require_whole

TUNE = ("tune", "--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "embed", "--jobs", "1")
COMPILE = ("compile", "--arch", "sm70", "--kernel", "embed", "--jobs", "1")
SHOW = ("kernel", "show", "embed", "--arch", "sm70", "--no-source")


def _require_message(done: tuple[int, str, str], code: int, says: str) -> None:
    """One message, which begins with the kind of error and in which `says` is found; a hint may follow."""
    got, out, err = done
    assert got == code, err
    assert "Traceback" not in err, err
    assert re.search(says, err), err
    first = [line for line in err.splitlines() if re.match(r"(?!Usage:)(error|[A-Z]\w+): ", line)]
    assert len(first) == 1, err
    assert out == ""


@pytest.mark.parametrize(("args", "code", "says"), [
    (("tune", "--arch", "sm71", "--model", "gemma-4-31b"), 2, r"unknown arch 'sm71'\n.*sm70, sm75"),
    (("compile", "--arch", "", "--cases"), 2, r"no arch given\n.*sm70"),
    (("arch", "show", "volta"), 2, r"unknown arch or board 'volta'\n  known: sm70.*V100"),
    (("arch", "show", "3090"), 2, r"unknown arch or board '3090'\n  did you mean RTX3090\? known: "),
    (("compile", "--arch", "h100", "--cases"), 2, r"unknown arch 'h100'\n  H100 is sm90; known: "),
    (("arch", "show", "90"), 2, r"unknown arch or board '90'\n  did you mean sm90\? known: "),
    (("tune", "--arch", "sm70"), 2, "--model"),
    (("tune", "--arch", "sm70", "--model", "gemma-5"), 2, r"unknown model 'gemma-5'\n.*gemma-4-31b"),
    (("tune", "--arch", "sm70", "--model", "./nowhere"), 2, r"nowhere is not a folder"),
    (("tune", "--arch", "sm70", "--model", "gemma-4-31b", "--draft", "x"), 2,
     r"has no drafter called x\n  --draft assistant or dflash"),
    (("bench", "model", "gemma-5"), 2, r"unknown model 'gemma-5'"),
    (("kernel", "show", "embd", "--arch", "sm70"), 2, r"unknown kernel 'embd'\n.*did you mean embed\?"),
    ((*TUNE, "--kernel", "moe_route"), 2, r"gemma-4-31b needs no moe_route on sm70\n.*embed"),
    ((*SHOW, "--problem", "hidden=7"), 2, r"hidden=7 is not a positive multiple of 8"),
    ((*SHOW, "--problem", "width=8"), 2, r"unknown problem field 'width'\n.*hidden, vocab_size"),
    ((*SHOW, "--problem", "hidden"), 2, r"'hidden' is not FIELD=VALUE\n.*hidden, vocab_size"),
    ((*SHOW, "--config", "thread=64"), 2, r"unknown config field 'thread'\n.*did you mean threads\?"),
    ((*SHOW, "--problem", "hidden=wide"), 2, r"hidden='wide' is not of type int"),
    ((*SHOW, "--problem", "dtype=bf16"), 1, r"bf16 needs sm80 or newer and sm70 has none; use fp16"),
    ((*SHOW, "--config", "threads=2048"), 2, r"threads=2048 is not in embed's space\n.*64, 128, 256, 512"),
    (("kernel", "show", "w4a16_gemm", "--arch", "sm70"), 2, r"needs n, k: there is no default\n  for example: "),
    ((*TUNE, "--device", "V101"), 2, r"unknown device 'V101'\n.*did you mean V100\?"),
    ((*TUNE, "--device", "H200"), 2, r"device H200 is sm90, not sm70"),
    ((*TUNE, "--time-budget", "soon"), 2, r"'soon' is no duration"),
    ((*TUNE, "--db", "/proc/no/tuning.db"), 1, "/proc/no"),
    ((*TUNE, "--trials", "0"), 2, r"--trials.*0 is not in the range"),
    (COMPILE, 2, r"--model NAME for a workload, or --cases"),
    ((*COMPILE, "--model", "gemma-4-31b", "--cases"), 2, r"--model and --cases are two things.*\n.*one of them"),
    (("compile", "--model", "gemma-4-31b"), 2, "name what to compile for: --arch sm70"),
    (("kernel", "show", "attn_decode", "--arch", "sm70", "--config", "num_warps=12,split_d=8"), 1, "split_d=8"),
    (("no-such-command",), 2, r"No such command 'no-such-command'"),
    (("db", "show", "ffff"), 2, r"no winner with id ffff"),
    (("db", "explain", "embed", "--arch", "sm70", "--problem", "x=1"), 2, r"unknown problem field 'x'"),
    (("run", str(ROOT / "examples/tiny/gemma-4-tiny"), "--prompt", "hi", "--device", "potato"), 2, "'potato'"),
    (("run", str(ROOT / "examples/tiny/gemma-4-tiny"), "--prompt", ""), 2, "the prompt is empty"),
    (("run", "./nowhere", "--prompt", ""), 2, r"nowhere is not a folder"),
    (("run", "./nowhere.gguf", "--prompt", "hi"), 2, r"there is no file nowhere.gguf\n.*a GGUF file, or a folder"),
    (("convert", "nowhere.gguf", "out"), 2, r"there is no file nowhere.gguf"),
    (("db", "show", "w4a16_gemm", "--problem", "nope"), 2, r"'nope' is not FIELD=VALUE"),
    (("db", "explain", "w4a16_gemm", "--problem", "n=5376,k=21504"), 2, "--arch is needed: w4a16_gemm"),
    (("run", ".", "--prompt", "hi", "--backend", "torch", "--db", "x.db"), 2, "torch backend looks nothing up"),
], ids=lambda v: " ".join(v) if isinstance(v, tuple) else "")  # fmt: skip
def test_misuse_is_one_clear_message(kerngen: Kerngen, args: tuple[str, ...], code: int, says: str) -> None:
    _require_message(kerngen(*args), code, says)
    assert kerngen.files() == []


def test_a_kernel_that_does_not_exist_is_said_at_once(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kerngen.workload.workload.workload", lambda *_: pytest.fail("the model was recorded"))
    _require_message(kerngen(*TUNE, "--kernel", "embd"), 2, r"unknown kernel 'embd'\n.*did you mean embed\?")


def test_a_model_that_does_not_fit_is_refused_at_once(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 20 if name == "SC_AVPHYS_PAGES" else 4096)
    _require_message(kerngen("bench", "model", "gemma-4-31b", "--backend", "torch"), 1, r"takes 123 GB.*4 GB")
    # the per-layer embeddings are half of it
    _require_message(kerngen("bench", "model", "gemma-4-e2b", "--backend", "torch"), 1, r"takes 19 GB.*4 GB")


@pytest.mark.parametrize(("place", "writing", "reading"), [
    ("/proc/nowhere/tuning.db", "cannot make its folder", "no such file"),
    ("notes.txt/tuning.db", "cannot make its folder", "no such file"),
    ("notes.txt", "is not an SQLite database", "is not an SQLite database"),
    ("half.db", r"is cut short: 2,048 of \d[\d,]+ bytes", r"is cut short: 2,048 of \d[\d,]+ bytes"),
    ("newer.db", "newer kerngen", "newer kerngen"),
    (".", "is a folder, not a database", "is a folder, not a database"),
    ("fifo", "is no regular file", "is no regular file"),
    ("/dev/zero", "is no regular file", "is no regular file"),
    ("x" * 300, "File name too long", "File name too long"),
])  # fmt: skip
def test_a_database_that_cannot_be_used(kerngen: Kerngen, place: str, writing: str, reading: str) -> None:
    (kerngen.folder / "notes.txt").write_text("Not a database, and somebody's work.\n")
    os.mkfifo(kerngen.folder / "fifo")
    for name in ("half.db", "newer.db"):
        Store.open(kerngen.folder / name).close()
    os.truncate(kerngen.folder / "half.db", 2048)
    with sqlite3.connect(kerngen.folder / "newer.db") as connection:
        connection.execute("UPDATE kerngen_alembic SET version_num = '9999'")
    connection.close()
    before = {name: (kerngen.folder / name).read_bytes() for name in kerngen.files()}
    for command, says in ((TUNE, writing), (("db", "ls"), reading)):
        _require_message(kerngen(*command, "--db", place), 1, f": .*{re.escape(place)}:? .*{says}")
    # SQLite may leave its own side files (-wal, -shm) beside a database that was opened and refused.
    assert {name: (kerngen.folder / name).read_bytes() for name in before} == before
    assert {name.removesuffix("-wal").removesuffix("-shm") for name in kerngen.files()} == set(before)


def test_a_pipe_beside_a_database_is_not_waited_for(kerngen: Kerngen) -> None:
    """SQLite would open it, where no signal reaches. It looks beside what a link leads to."""
    Store.open(kerngen.folder / "mine.db").close()
    (kerngen.folder / "link.db").symlink_to("mine.db")
    for end in ("-wal", "-shm", "-journal"):
        os.mkfifo(kerngen.folder / f"mine.db{end}")
        for name in ("mine.db", "link.db"):
            with pytest.raises(DatabaseError, match=f"mine.db{end} .*regular file"):
                require_whole(Path(name))
        if end == "-journal":
            _require_message(
                kerngen.run("db", "ls", "--db", "link.db"), 1, "DatabaseError: .*mine.db-journal is no reg"
            )
        os.unlink(kerngen.folder / f"mine.db{end}")


def test_a_users_database_that_cannot_be_opened_is_named_and_passed_over(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one in a home that is somebody else's; a file name that is too long stands for it."""
    monkeypatch.setenv("KERNGEN_DB", "x" * 300)
    out = kerngen.ok("db", "ls", "--kernel", "rmsnorm", "--arch", "sm90")
    assert re.search("^rmsnorm +sm90 ", out, re.MULTILINE)
    assert caplog.messages == [f"{'x' * 300}: File name too long; looking on without it"]


def test_a_server_that_accepts_and_stays_silent_is_given_up(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever names a server is told that it does not answer, and not shown what else there is."""
    monkeypatch.setattr("kerngen.tuning_db.store.engine.CONNECT_S", 2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"postgresql+psycopg://me@127.0.0.1:{server.getsockname()[1]}/name"
        monkeypatch.setenv("KERNGEN_DB", url)
        for command in (("db", "ls", "--kernel", "rmsnorm", "--arch", "sm90"), TUNE):
            _require_message(kerngen(*command), 1, "DatabaseError: .*: connection timeout expired\n  is that server up")


def _ship_little(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be kept is made of the sheets at each use: these take a tenth of the time that all take."""
    few = measured_sheets(kerngen.folder / "prebuilt" / "few", ("embed", "rmsnorm"))
    monkeypatch.setattr(places, "PREBUILT", few)


def test_a_cache_that_cannot_be_written_is_a_warning(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _ship_little(kerngen, monkeypatch)
    (kerngen.folder / "notes.txt").write_text("a file where a folder is expected")
    for place in ("/proc/nowhere", "notes.txt"):
        monkeypatch.setenv("KERNGEN_CACHE_DIR", place)
        caplog.clear()
        out = kerngen.ok("kernel", "show", "rmsnorm", "--arch", "sm90", "--no-source")
        assert "registers a thread" in out
        cache, shipped = caplog.messages
        assert f"cannot write to the compile cache {place}" in cache
        assert "cannot be kept" in shipped
        assert all("KERNGEN_CACHE_DIR" in message for message in (cache, shipped))
    assert kerngen.files() == ["notes.txt"]


def test_a_home_that_cannot_be_written(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What needs a place says which variable names one; what needs none works."""
    _ship_little(kerngen, monkeypatch)
    monkeypatch.setenv("HOME", "/dev/null")
    for name in ("KERNGEN_CACHE_DIR", "KERNGEN_DB", "CUPY_CACHE_DIR", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, "")  # so that whatever this process makes of it is undone
        monkeypatch.delenv(name)
    code, out, err = kerngen.run("doctor")
    assert code == 0, err
    assert "NVRTC" in out
    for subject, fix in (("cache", "KERNGEN_CACHE_DIR"), ("database", "KERNGEN_DB")):
        assert re.search(rf"^-- +{subject} .* cannot be .*\n +export {fix}=", out, re.MULTILINE), out
    out = kerngen.ok("compile", "--arch", "sm90", "--model", "gemma-4-31b", "--kernel", "embed", "-o", "out")
    assert re.search(r"^(\d+) builds: \1 from: NVRTC", out, re.MULTILINE)
    assert "out is a bundle" in out
    assert re.search(r"cannot write to the compile cache.*KERNGEN_CACHE_DIR", caplog.text)
    caplog.clear()
    code, out, _ = kerngen("db", "ls", "--arch", "sm90")
    assert (code, bool(re.search("^rmsnorm +sm90 ", out, re.MULTILINE))) == (0, True)
    assert re.search(r"cannot be kept: .*KERNGEN_CACHE_DIR", caplog.text)
    code, out, err = kerngen(*COMPILE, "--cases")
    assert (code, out) == (1, "")
    assert re.search(r"CacheError: nothing was kept.*\n.*-o.*KERNGEN_CACHE_DIR", err)
    code, out, err = kerngen(*TUNE)
    assert (code, out) == (1, "")
    assert re.search(r"DatabaseError: .*cannot make its folder.*\n.*KERNGEN_DB", err)
    kerngen.ok(*TUNE, "--trials", "1", "--db", "own.db")


def test_a_cupy_folder_that_cannot_be_made_is_named(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", "/dev/null/here")
    code, out, err = kerngen.run(*SHOW)
    assert (code, out) == (1, "")
    assert re.search(r"ToolchainError: .*/dev/null/here.*\n.*export CUPY_CACHE_DIR=", err)


@pytest.mark.parametrize(("place", "code"), [("/proc/nowhere", 1), ("notes.txt/out", 1), ("notes.txt", 2)])
def test_an_output_that_cannot_be_written(kerngen: Kerngen, place: str, code: int) -> None:
    (kerngen.folder / "notes.txt").write_text("a file where a folder is expected")
    _require_message(kerngen(*COMPILE, "--cases", "-o", place), code, f"cannot write {place}|'{place}' is a file")
    assert kerngen.files() == ["notes.txt"]


@pytest.mark.parametrize("command", [TUNE, (*COMPILE, "--cases", "-o", "out"), SHOW], ids=lambda c: c[0])
def test_no_compile_makes_a_miss_an_error(
    kerngen: Kerngen, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNGEN_NO_COMPILE", "1")
    _require_message(kerngen(*command), 1, r"TuningMiss: .*sm70.*KERNGEN_NO_COMPILE forbids.*\n.*kerngen compile")
    assert not (kerngen.folder / "out").exists()
    assert not (kerngen.folder / "cache").exists()


def test_a_broken_override_database_is_named_and_passed_over(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (kerngen.folder / "notes.txt").write_text("Not a database.\n")
    monkeypatch.setenv("KERNGEN_DB_OVERRIDE", "notes.txt")
    out = kerngen.ok(*COMPILE, "--model", "gemma-4-31b")
    assert "in the compile cache only" in out
    assert [r.getMessage() for r in caplog.records] == ["notes.txt is not an SQLite database; looking on without it"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_under_stdout(kerngen: Kerngen) -> None:
    with open("/dev/full", "w") as full:
        code, _, err = kerngen.run("arch", "ls", stdout=full)
    assert (code, err) == (1, "error: No space left on device\n")


@pytest.mark.parametrize("args", [("kernel", "ls"), ("arch", "ls", "--json"), ("--help",)], ids=" ".join)
def test_a_pipe_that_nobody_reads_is_no_crash(kerngen: Kerngen, args: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        code, _, err = kerngen.run(*args, stdout=write)
    finally:
        os.close(write)
    assert code == 1
    assert err == ""
