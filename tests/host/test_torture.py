"""What becomes of databases on bad days: a disk that fills up, files that are torn or flipped, while they are served.

Every flipped byte of a sealed file's first and last page is tests/host/test_sealed.py's; killed writers are
test_tuning_db_processes.py's. Here a run looks things up in what is left.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import Kerngen
from test_merge import FACTS, derive, rows
from test_tuning_db import add_build, measured

from kerngen.arch import Target, find_device
from kerngen.errors import DatabaseError
from kerngen.templates import find_kernel
from kerngen.tuning_db import Store, lookup
from kerngen.tuning_db.keep.bundles import open_bundle
from kerngen.tuning_db.ship.seal import damage
from kerngen.tuning_db.sources import open_source

KERNEL, HERE = find_kernel("gelu_gate"), Target.of(find_device("H200"))


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    kerngen = Kerngen(tmp_path, monkeypatch, capsys)
    assert kerngen("db", "export", "--arch", "sm90", "--kernel", KERNEL.name, "-o", "b.kgdb")[0] == 0
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


def test_a_run_is_told_what_was_sealed_or_nothing(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of flips anywhere: each is found by who verifies it, and none has anything else served, or raises."""
    caplog.set_level(logging.CRITICAL)
    data = bundle.read_bytes()
    asked = _asked(bundle)
    whole = _answers(bundle, asked)
    assert None not in whole
    chosen = random.Random(7)
    lost = 0
    for at in (*chosen.sample(range(len(data)), 150), *range(len(data) - 64, len(data), 4)):
        bundle.write_bytes(data[:at] + bytes([data[at] ^ (1 << chosen.randrange(8))]) + data[at + 1 :])
        assert damage(bundle) if at < len(data) - 64 else _is_refused(bundle), at
        try:
            told = _answers(bundle, asked)
        except DatabaseError:
            lost += 1
            continue
        assert all(now in (None, was) for now, was in zip(told, whole, strict=True)), at
        lost += told != whole
    assert lost


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
    again = open_source_or_none(bundle)
    assert again is None
    os.remove(bundle)
    after = lookup([source], KERNEL, asked, HERE)
    assert after is None or (str(after.config), after.latency_us) == whole[0][:2]  # type: ignore[index]


def open_source_or_none(path: Path) -> object:
    try:
        return open_source(path)
    except DatabaseError:
        return None


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
        assert error is not None
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
