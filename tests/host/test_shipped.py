"""What is shipped is made a database of at first use: once, of the near board alone, and read if it is one's own."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import func, select

from kerngen.arch import Target, find_device
from kerngen.cli.process import settle_notes
from kerngen.errors import DatabaseError
from kerngen.runtime.serve.engine_start import prepare_databases
from kerngen.system.gpus import Gpu, gpus_here
from kerngen.templates import find_kernel
from kerngen.tuning.worker import present_arch
from kerngen.tuning_db import default_stores, lookup, shipped
from kerngen.tuning_db.dist.results_parser import parse
from kerngen.tuning_db.read import boards, places
from kerngen.tuning_db.read.reader import Reader
from kerngen.tuning_db.read.sealed import Sealed
from kerngen.tuning_db.shipped import Shipped, key_of, open_board, path_of
from kerngen.tuning_db.store import schema
from kerngen.tuning_db.store.store import Store

SHEETS = places.PREBUILT / "H200"
H200, H100, V100 = (Target.of(find_device(name)) for name in ("H200", "H100", "V100"))
GATE = find_kernel("gelu_gate")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installation with one board's sheets of one kernel; the folder that what is made of them goes to."""
    for name in [n for n in os.environ if n.startswith("KERNGEN_")]:
        monkeypatch.delenv(name)
    (tmp_path / "sheets" / "H200").mkdir(parents=True)
    shutil.copy(SHEETS / "gelu_gate.txt", tmp_path / "sheets" / "H200")
    monkeypatch.setattr(places, "PREBUILT", tmp_path / "sheets")
    monkeypatch.setenv("KERNGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KERNGEN_DB", str(tmp_path / "none.db"))
    boards._boards_in.cache_clear()
    yield tmp_path / "cache" / "prebuilt"
    boards._boards_in.cache_clear()


def problem() -> Any:
    return GATE.problem_type(**_fields())


def _fields() -> Mapping[str, Any]:
    """Of the first problem that is shipped."""
    file = parse((SHEETS / "gelu_gate.txt").read_text())
    return file.fields(*next(iter(file.points())))


def told(value: int, where: Any) -> int:
    """What a function of the driver does."""
    where._obj.value = value
    return 0


def here() -> boards.Board:
    (board,) = boards.shipped_boards()
    return board


def test_the_engine_makes_it_beside_its_imports(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(
        cuInit=lambda flags: 0, cuDeviceGetCount=partial(told, 2),
        cuDeviceGet=lambda device, index: told(index, device),
        cuDeviceGetName=lambda name, size, device: setattr(name, "value", b"NVIDIA H200"),
        cuDeviceGetAttribute=lambda number, attribute, device: told({16: 132, 75: 9, 76: 0}[attribute], number),
        cuDeviceTotalMem_v2=lambda size, device: told(int(139.8 * 2**30), size),
    )  # fmt: skip
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    assert gpus_here() == [Gpu("NVIDIA H200", 132, 139.8, (9, 0))] * 2
    assert present_arch() == H200.arch
    prepare_databases()
    (path,) = cache.glob("*.kgdb")
    made = path.stat().st_mtime_ns
    prepare_databases()
    assert path.stat().st_mtime_ns == made
    assert open_board(here()).where == str(path)


def test_what_the_engine_cannot_make_beside_them_is_said_by_who_opens_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (cache.parent).mkdir()
    cache.write_text("no folder")
    shipped.prepare(here())
    assert not caplog.records
    open_board(here())
    assert "cannot be kept" in caplog.text


def test_the_first_use_makes_it_and_the_next_reads_it(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kerngen.tuning_db.shipped"):
        first = lookup([Shipped()], GATE, problem(), H200)
        assert caplog.text.count("preparing ") == 1
        assert first is not None
        assert (first.source, first.provenance) == ("prebuilt H200: exact device", "measured")
        assert first.cubin is None, "it is compiled by whoever launches it"
        assert not first.stale
        again = lookup([Shipped()], GATE, problem(), H200)
        assert again is not None
        assert (again.id, again.config) == (first.id, first.config)
        assert caplog.text.count("preparing ") == 1
    (file,) = cache.glob("*.kgdb")
    assert Sealed.open(file).header["prebuilt"] == key_of(here())
    assert file.stat().st_mode & 0o222 == 0
    with open_board(here()) as source:
        assert isinstance(source, Reader)


def test_reading_it_takes_no_sqlalchemy_and_no_jinja(cache: Path) -> None:
    open_board(here()).close()
    code = (
        "import sys, json; sys.modules.update(dict.fromkeys(('sqlalchemy', 'alembic', 'jinja2', 'torch', 'cupy')));"
        "from pathlib import Path; from kerngen.tuning_db.read import places;"
        f"places.PREBUILT = Path({str(places.PREBUILT)!r});"
        "from kerngen.arch import Target, find_device; from kerngen.templates import find_kernel;"
        "from kerngen.tuning_db import default_sources, lookup; k = find_kernel('gelu_gate');"
        "p = k.problem_type(**json.loads(sys.argv[1]));"
        "print(lookup(default_sources(), k, p, Target.of(find_device('H200'))).provenance)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(_fields())], capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("measured", "")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_is_told_what_takes_seconds(
    cache: Path, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("kerngen.tuning_db.shipped")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    settle_notes()
    for _ in range(2):
        open_board(here()).close()
    told = "preparing what is shipped for H200, once for this version"
    assert capsys.readouterr().err.count(told) == is_terminal
    log.setLevel(logging.NOTSET)


def test_several_processes_make_what_one_makes(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Winner for winner, of kernels with many static problems and with few."""
    for name in ("rmsnorm.txt", "add_norm.carried.txt"):
        shutil.copy(SHEETS / name, tmp_path / "sheets" / "H200")
    boards._boards_in.cache_clear()

    def made(cores: int, share: int) -> dict[str, set[str]]:
        monkeypatch.setattr(shipped, "usable_cores", lambda: cores)
        monkeypatch.setattr(shipped, "SHARE_BYTES", share)
        with shipped.in_memory(here()) as store, store.reading() as connection:
            found = {
                table.name: {repr(row) for row in connection.execute(table.select())}
                for table in schema.metadata.sorted_tables
                if table.name not in ("measurement", "line", "winner")  # which say when a row that is carried was made
            }
            w = schema.winner.c
            won = select(w.problem_id, w.build_id, w.device_id, w.provenance, w.latency_us, w.closure)
            found["winner"] = {repr(row) for row in connection.execute(won)}
            found["trials"] = {str(connection.execute(select(func.count(schema.measurement.c.id))).scalar())}
            return found

    alone = made(1, 1)
    assert len(alone["winner"]) > 50
    assert made(3, 1) == alone
    submitted = []
    monkeypatch.setattr(shipped.Processes, "submit", lambda *_: submitted.append(1))
    assert made(3, 1 << 20) == alone, "few results are no work for several"
    assert not submitted


def test_a_board_that_is_far_from_all_makes_nothing(cache: Path) -> None:
    assert lookup([Shipped()], GATE, problem(), H100) is None
    assert lookup([Shipped()], GATE, problem(), V100) is None
    assert not cache.exists()
    assert default_stores([H100, V100]) == []
    assert not cache.exists()


def test_only_the_nearest_board_is_made(cache: Path) -> None:
    text = (SHEETS / "gelu_gate.txt").read_text()
    kin = places.PREBUILT / "H200-kin"
    kin.mkdir()
    assert '"num_sms":132' in text
    (kin / "gelu_gate.txt").write_text(text.replace('"num_sms":132', '"num_sms":120').replace(" H200\n", " H200-kin\n"))
    boards._boards_in.cache_clear()
    assert lookup([Shipped()], GATE, problem(), H200) is not None
    assert [p.name.rpartition("-")[0] for p in cache.glob("*.kgdb")] == ["H200"]
    assert [s.name for s in default_stores([H200])] == ["prebuilt H200"]
    assert len(list(cache.glob("*.kgdb"))) == 1
    assert [s.name for s in default_stores()] == ["prebuilt H200", "prebuilt H200-kin"], "who looks at all, makes all"


def test_other_sheets_or_other_kernels_are_another_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_board(here()).close()
    (old,) = cache.glob("*.kgdb")
    sheet = places.PREBUILT / "H200" / "gelu_gate.txt"
    sheet.write_text(sheet.read_text().replace(" err 0", " err 1", 1))
    open_board(here()).close()
    (new,) = cache.glob("*.kgdb")
    assert new != old
    monkeypatch.setattr("kerngen.tuning_db.shipped.source_digest_of", lambda kernel: "another")
    assert path_of(here(), key_of(here())) != new


def test_a_file_that_others_may_have_written_is_not_read(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_board(here()).close()
    (file,) = cache.glob("*.kgdb")
    file.chmod(0o666)
    found = open_board(here())
    assert isinstance(found, Store), "made in memory"
    assert "can be written by everyone" in caplog.text
    assert caplog.text.count("is made anew by each process") == 1
    assert found.line("gelu_gate", found.winners()[0].problem.static_key, "sm90") is not None
    file.chmod(0o444)
    cache.chmod(0o777)
    assert isinstance(open_board(here()), Store)
    cache.chmod(0o755)
    assert isinstance(open_board(here()), Reader)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_lies_in_place_of_its_lock_is_left_alone(
    cache: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In a cache that others may write to: a link of theirs would have emptied the file, a pipe would be waited for."""
    cache.mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (cache / ".lock").symlink_to(victim) if kind == "link" else os.mkfifo(cache / ".lock")
    assert lookup([Shipped()], GATE, problem(), H200) is not None
    assert victim.read_text() == "precious"
    assert re.search("cannot be kept: (Too many levels of symbolic links|is no regular file); .*KERNGEN_CACHE_DIR",
                     caplog.text)  # fmt: skip


@pytest.mark.parametrize("at", [-1, -100, 0, 5000])
def test_a_damaged_file_is_made_anew(cache: Path, at: int, caplog: pytest.LogCaptureFixture) -> None:
    with open_board(here()) as source:
        sound = {w.id for w in source.winners()}
    (file,) = cache.glob("*.kgdb")
    data = bytearray(file.read_bytes())
    data[at] ^= 0xFF
    file.chmod(0o644)
    file.write_bytes(data)
    with open_board(here()) as source:
        served = {w.id for w in source.winners()}
    if at == 5000:  # within a page: each row is asked for among the sealed ones, and only what was changed is lost
        assert served <= sound
        return
    assert served == sound
    assert "it is made anew" in caplog.text
    assert Sealed.open(file).is_whole()


def test_sheets_that_are_broken_are_a_warning_and_nothing_more(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    sheet = places.PREBUILT / "H200" / "gelu_gate.txt"
    sheet.write_text(sheet.read_text() + "no line of a sheet")
    assert lookup([Shipped()], GATE, problem(), H200) is None
    assert re.search(r"line \d+: 'no line of a sheet' is too much; looking on without it", caplog.text)
    with pytest.raises(DatabaseError, match="is too much"):
        open_board(here())


def test_64_processes_at_once_make_it_once(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kerngen.tuning_db import shipped

    made = shipped._make

    def noted(*args: Any) -> None:
        with (tmp_path / "made").open("a") as f:
            f.write(f"{os.getpid()}\n")
        made(*args)

    monkeypatch.setattr(shipped, "_make", noted)
    start = time.monotonic() + 1.0
    children = []
    for _ in range(64):
        if (child := os.fork()) == 0:
            code = 1
            try:
                time.sleep(max(0.0, start - time.monotonic()))
                found = open_board(here())
                code = 0 if isinstance(found, Reader) and found.winners() else 2
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 64
    assert len((tmp_path / "made").read_text().split()) == 1
    assert len(list(cache.glob("*.kgdb"))) == 1
