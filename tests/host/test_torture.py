"""What becomes of databases on bad days: killed writers, disks that are full or read-only, files that are torn or
flipped, while they are served.

Here a run looks things up in what is left. A short form is in every run of the tests; the whole, with 64 writers for
two minutes, and each byte of a bundle's first and last page and 10^4 others, takes about four minutes:

    KERNGEN_TEST_TORTURE=120 python -m pytest tests/host/test_torture.py -s
"""

from __future__ import annotations

import logging
import os
import random
import re
import resource
import shutil
import sqlite3
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import Kerngen
from test_merge import FACTS, derive, rows
from test_tuning_db import H200, add_build, key_of, measured
from torture import POINTS, TORTURE_S, killed_writers, noted, read_only, small_disk, start_writers

from kerngen.arch import Target, find_device
from kerngen.errors import DatabaseError
from kerngen.system.files import publish
from kerngen.templates import find_kernel
from kerngen.tuning_db import Store, lookup
from kerngen.tuning_db.dist.seal import damage
from kerngen.tuning_db.dist.verify import LEVELS, verify
from kerngen.tuning_db.read.kernel_index import index_id_of
from kerngen.tuning_db.read.sealed import Sealed
from kerngen.tuning_db.sources import open_source
from kerngen.tuning_db.store.bundles import open_bundle

KERNEL, HERE = find_kernel("gelu_gate"), Target.of(find_device("H200"))


@pytest.fixture
def bundle(tmp_path: Path, kerngen: Kerngen) -> Path:
    which = ("--device", "H200", "--model", "gemma-4-31b", "--kernel", KERNEL.name)
    assert kerngen("compile", *which, "-o", "b.kgdb")[0] == 0, "with machine code, which an export of sheets has not"
    os.chmod("b.kgdb", 0o644)
    return tmp_path / "b.kgdb"


def _asked(path: Path) -> list[Any]:
    """Some tuned points, and one between two."""
    with open_bundle(path) as store:
        points = [KERNEL.problem_type(**w.problem.fields) for w in store.winners()]
    return [*points[::4], replace(max(points, key=lambda p: p.num_tokens), num_tokens=3)]


def _answers(path: Path, asked: list[Any]) -> list[tuple[object, ...] | None]:
    """What a run is told of each: configuration, time, machine code, how it is known."""
    source = open_source(path)
    told: list[tuple[object, ...] | None] = []
    for problem in asked:
        w = lookup([source], KERNEL, problem, HERE)
        told.append(None if w is None else (str(w.config), w.latency_us, w.cubin and w.cubin.image, w.provenance))
    return told


def _places(bundle: Path, chosen: random.Random) -> list[int]:
    """Of bytes to flip: in the first and the last page of the database, in the tail, and anywhere."""
    size, total, page = Sealed.open(bundle).header["image"]["bytes"], bundle.stat().st_size, 4096
    ends = [*range(page), *range(size - page, size), *range(total - 64, total)]
    if TORTURE_S:
        return ends + chosen.choices(range(total), k=10_000)
    return chosen.sample(ends, 60) + chosen.sample(range(total), 120)


def test_a_run_is_told_what_was_sealed_or_nothing(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of flips: each is found by who verifies it; none has anything else served, or raises; a miss says so."""
    data = bundle.read_bytes()
    asked = _asked(bundle)
    whole = _answers(bundle, asked)
    assert None not in whole
    chosen = random.Random(7)
    came = Counter[str]()
    fd = os.open(bundle, os.O_RDWR)
    for at in _places(bundle, chosen):
        os.pwrite(fd, bytes([data[at] ^ (1 << chosen.randrange(8))]), at)
        assert damage(bundle) if at < len(data) - 64 else _is_refused(bundle), at
        caplog.clear()
        try:
            told = _answers(bundle, asked)
        except DatabaseError as e:
            assert str(bundle) in e.message  # noqa: PT017
            came["refused"] += 1
        else:
            for now, was in zip(told, whole, strict=True):
                assert now in (None, was) or (was is not None and now == (*was[:2], None, was[3])), at
            came["missed" if told != whole else "served"] += 1
            if told != whole:
                assert any(r.levelno >= logging.WARNING for r in caplog.records), f"byte {at}: a miss without a word"
        os.pwrite(fd, data[at : at + 1], at)
    os.close(fd)
    assert min(came["refused"], came["missed"], came["served"]) > 0, came
    assert damage(bundle) == []
    print(f"\nflipped bytes: {came.total()}: {dict(came)}")


def test_a_damaged_index_is_read_around(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A key lies in its table and in the index: whichever is damaged, it is said; the index is done without."""
    data, asked = bundle.read_bytes(), _asked(bundle)[:1]
    whole = _answers(bundle, asked)
    with open_bundle(bundle) as store:
        keys = [w.problem.static_key for w in store.winners()[:1]] + [str(b.image_sha) for b in store.kept_builds()]
    keys += [index_id_of(keys[0], "sm90")]
    said = set()
    for key in keys:
        places = [m.start() for m in re.finditer(key.encode(), data[: len(data) - 64])]
        for at in places:
            bundle.write_bytes(data[:at] + b"~" + data[at + 1 :])
            caplog.clear()
            try:
                told = _answers(bundle, asked)
            except DatabaseError:
                continue
            warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
            assert told == whole or warned, (key, at)
            said |= {re.sub(r".*: ", "", w) for w in warned if "index of" in w and told == whole}
    assert {w.partition(" is ")[0] for w in said} == {"the index of line", "the index of artifact"}


def _is_refused(path: Path) -> bool:
    """A footer that is not one is no sealed file's: there is nothing to compare."""
    try:
        return bool(damage(path))
    except DatabaseError:
        return True


def test_a_file_that_shrinks_or_goes_while_it_is_served(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Replaced by renaming, the old one is served on; cut short under its reader, what is told is right or nothing."""
    asked = _asked(bundle)[0]
    whole = _answers(bundle, [asked])
    source = open_source(bundle)
    shutil.copy(bundle, "other.kgdb")
    os.replace("other.kgdb", bundle)
    found = lookup([source], KERNEL, asked, HERE)
    assert found is not None
    os.truncate(bundle, 8192)
    with pytest.raises(DatabaseError):
        open_source(bundle)
    os.remove(bundle)
    after = lookup([source], KERNEL, asked, HERE)
    assert after is None or (str(after.config), after.latency_us) == whole[0][:2]  # type: ignore[index]


@pytest.mark.parametrize("spare", [0, 1, 3, 8])
def test_a_disk_that_fills_up(tmp_path: Path, spare: int) -> None:
    """One clear error; all that was committed before is there, nothing of what was not, and with room it goes on."""
    with Store.open(tmp_path / "full.db") as store:
        FACTS[1](store)
        derive(store)
        with store.engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + spare}")  # of the connection, which is pooled
        committed = rows(store)
        error = None
        for n in range(10, 200):
            try:
                with store.transaction():
                    store.add_measurement(measured(add_build(store, n), n, 10.0 + n, at=f"{n}", run="r"))
                    derive(store)
            except DatabaseError as e:
                error = e.message
                break
            committed = rows(store)
        assert "full.db has no space left to write to; what was committed is safe" in error
        assert rows(store) == committed
        with store.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
        store.add_measurement(measured(add_build(store, 201), 201, 5.0, at="z", run="r"))
    with Store.open(tmp_path / "full.db", read_only=True) as store:
        assert set(committed["measurement"]) < set(rows(store)["measurement"])


def test_torn_copies_of_a_database_that_is_written_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whole, or refused in words, or fewer rows: never a winner that was not chosen."""
    caplog.set_level(logging.CRITICAL)
    path, torn = tmp_path / "mine.db", tmp_path / "torn.db"
    with Store.open(path) as store:
        for n in (1, 2, 4, 7):
            FACTS[n](store)
        derive(store)
        want = {(w.id, w.build_id, w.latency_us) for w in store.winners()}
    data = path.read_bytes()
    for size in (*range(0, len(data), 4096), 50, 5000, len(data) - 1):
        torn.write_bytes(data[:size])
        try:
            with Store.open(torn, read_only=True) as store:
                assert {(w.id, w.build_id, w.latency_us) for w in store.winners()} <= want
        except DatabaseError as e:
            assert str(torn) in e.message  # noqa: PT017


def test_64_writers_lose_nothing(tmp_path: Path) -> None:
    """On a file that is not there yet, so that all of them race to make it."""
    path, logs = tmp_path / "tuning.db", tmp_path / "logs"
    writers = start_writers(path, logs, 64, 6)
    _, errors = writers.communicate(timeout=90)
    assert writers.returncode == 0, errors
    with Store.open(path) as store:
        ids = {o.id for o in store.measurements()}
    assert len(ids) == 64 * 6
    assert ids == noted(logs)
    _require_sound(path)


def test_writers_that_are_killed_lose_nothing_that_was_committed(tmp_path: Path) -> None:
    """64 of them when it is torture; killed one after another, at any time, and all at once in the end. Meanwhile what
    is read is whole: each winner is what some committed row says.
    """
    path, logs = tmp_path / "tuning.db", tmp_path / "logs"
    looks = 0
    with killed_writers(path, logs, 64 if TORTURE_S else 4) as writers:
        until = time.monotonic() + (TORTURE_S or 30)
        while time.monotonic() < until and writers.poll() is None:
            if path.exists() and (seen := noted(logs)):
                with Store.open(path, read_only=True) as store:
                    for w in store.winners("toy"):
                        assert (w.latency_us, w.config) == (10.0 + w.config["block_n"], store.build(w.build_id).config)
                    looks += 1
                if not TORTURE_S and len(seen) > 100 and len(list(logs.iterdir())) > 8:
                    break
            time.sleep(0.1)
        assert writers.poll() is None, writers.stderr and writers.stderr.read()
    committed, num_writers = noted(logs), len(list(logs.iterdir()))
    assert looks > 0
    assert len(committed) > 50
    assert num_writers > 4
    with Store.open(path) as store:
        rows = store.measurements()
        assert committed <= {o.id for o in rows}
        for build_id in {o.measurement.build_id for o in rows}:
            assert store.image(store.build(str(build_id))) is not None, "half a transaction"
        winners = store.recompute_winners("toy", key_of().static_key, Target.of(H200))
        assert 0 < len(winners) <= POINTS
        best = {o.measurement.problem.id: 99 for o in rows}
        for o in rows:
            best[o.measurement.problem.id] = min(best[o.measurement.problem.id], o.measurement.config["block_n"])
        assert {w.problem.id: w.config["block_n"] for w in winners} == best
    assert [v.faults for v in verify(str(path), LEVELS[:2])] == [[], []]
    _require_sound(path)
    print(
        f"\nkilled writers: {num_writers} wrote {len(rows)} rows, {len(committed)} by their own account; {looks} looks"
    )


def _require_sound(path: Path) -> None:
    with closing(sqlite3.connect(path)) as c:
        assert c.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def _fill(store: Store, first: int) -> tuple[str, dict[str, Any]]:
    """Write until there is no more room: (what is said then, the rows that were committed by then)."""
    committed = rows(store)
    for n in range(first, first + 3000):
        try:
            with store.transaction():
                store.add_measurement(measured(add_build(store, n), n, 10.0 + n, at=f"{n}", run="r"))
        except DatabaseError as e:
            return e.message, committed
        committed = rows(store) if n % 50 == 0 else committed
    raise AssertionError("it never filled up")


def test_a_disk_that_is_full(tmp_path: Path, bundle: Path) -> None:
    """A real one. What was committed is there and is served; where there is room again, it goes on."""
    with small_disk(tmp_path / "disk", 3000) as disk:
        filler = disk / "somebody's.bin"
        filler.write_bytes(bytes(1 << 20))
        shutil.copy(bundle, disk / "b.kgdb")
        with Store.open(disk / "full.db") as store:
            FACTS[1](store)
            derive(store)
            error, committed = _fill(store, 10)
            assert "no space left to write to; what was committed is safe" in error
            now = rows(store)
            assert all(set(committed[table]) <= set(now[table]) for table in committed)
            assert open_source(disk / "full.db").winners("toy")
            assert _answers(disk / "b.kgdb", _asked(disk / "b.kgdb")), "a sealed file needs no room"
            with pytest.raises(OSError, match="No space left"):
                publish(bundle.read_bytes(), disk / "other.kgdb")
            assert {p.name for p in disk.iterdir() if "full.db" not in p.name} == {"b.kgdb", filler.name}
            filler.unlink()
            store.add_measurement(measured(add_build(store, 5000), 5000, 5.0, at="z", run="r"))
        assert [v.faults for v in verify(str(disk / "full.db"), LEVELS[:2])] == [[], []]


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """A quota, as setrlimit has it: an error in words, and nothing committed is lost."""
    with Store.open(tmp_path / "full.db") as store:
        FACTS[1](store)
        derive(store)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "full.db").stat().st_size + (1 << 18), hard))
        try:
            error, committed = _fill(store, 10)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert str(tmp_path / "full.db") in error
        now = rows(store)
        assert all(set(committed[table]) <= set(now[table]) for table in committed)
        store.add_measurement(measured(add_build(store, 5000), 5000, 5.0, at="z", run="r"))
    assert [v.faults for v in verify(str(tmp_path / "full.db"), LEVELS[:2])] == [[], []]


def test_a_disk_that_is_read_only(tmp_path: Path, bundle: Path) -> None:
    """What lies there is served, root or not, and one clear line says that nothing can be written."""
    with small_disk(tmp_path / "disk", 4000) as disk:
        shutil.copy(bundle, disk / "b.kgdb")
        with Store.open(disk / "mine.db") as store:
            FACTS[1](store)
            derive(store)
            want = store.winners("toy")
        read_only(disk)
        whole = _answers(bundle, _asked(bundle))
        assert _answers(disk / "b.kgdb", _asked(bundle)) == whole
        with Store.open(disk / "mine.db", read_only=True) as store:
            assert store.winners("toy") == [replace(w, source=w.source) for w in want]
        assert open_source(disk / "mine.db").winners("toy")
        with pytest.raises(DatabaseError, match=r"mine\.db .*(read-only|opened)"), \
                Store.open(disk / "mine.db") as store:  # fmt: skip
            store.add_measurement(measured(add_build(store, 2), 2, 5.0))
        assert [v.ok for v in verify(str(disk / "b.kgdb"), LEVELS[:3])] == [True, True, True]
