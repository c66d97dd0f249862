"""Databases that a disk, a copy or a hand damaged: what is unharmed is served, the rest is named, nothing raises."""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import sqlite3
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import zstandard
from command import Kerngen
from sqlalchemy import Text
from test_tuning_db import H200, STATIC, add_build, key_of, measured
from test_tuning_db_cli import tune_rmsnorm

from kerngen.arch import Target
from kerngen.compiler.compile import compile_cubin
from kerngen.compiler.render import render
from kerngen.errors import DatabaseError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import fields_of, static_fields
from kerngen.tuning_db import Measurement, Store, lookup, problem_key, static_key
from kerngen.tuning_db.read.reader import Reader
from kerngen.tuning_db.store import schema as t
from kerngen.tuning_db.store.rows import _seal, to_json

TEXTS = [
    (table.name, c.name)
    for table in (t.winner, t.build, t.measurement, t.problem, t.device, t.environment)
    for c in table.columns
    if isinstance(c.type, Text) and not c.primary_key and not c.foreign_keys
]


def run(path: Path, statement: str) -> None:
    """`statement` without the checks that the schema makes, as damage makes none."""
    with sqlite3.connect(path) as c:
        c.execute("PRAGMA ignore_check_constraints = ON")
        assert c.execute(statement).rowcount > 0
    c.close()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two measured points of `toy`, each with a build of its own, and a prediction for rmsnorm."""
    path = tmp_path_factory.mktemp("pristine") / "tuning.db"
    with Store.open(path) as store:
        for n, point in enumerate((64, 128)):
            store.add_measurement(measured(add_build(store, n), n, 10.0 + n, problem=key_of(point)))
        store.recompute_winners("toy", key_of().static_key, Target.of(H200))
    tune_rmsnorm(path, "")
    with sqlite3.connect(path) as c:
        c.execute("PRAGMA journal_mode = delete")
    c.close()
    return path


@pytest.fixture
def path(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(pristine, tmp_path / "tuning.db"))


@pytest.mark.parametrize(("table", "column"), TEXTS, ids=lambda v: v)
def test_a_byte_that_is_no_text_costs_its_own_row_alone(
    path: Path, table: str, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    own_row = {"winner": "latency_us = 10.0", "measurement": "p50_us = 10.0", "build": "config LIKE '%:0}'",
               "problem": "dynamic = 64"}.get(table, "1")  # fmt: skip
    run(path, f"UPDATE {table} SET {column} = CAST(COALESCE({column}, '') || x'ff' AS TEXT) WHERE {own_row}")
    with Store.open(path, read_only=True) as store:
        winners = [w.latency_us for w in store.winners() if w.kernel == "toy"]
        seen = [o.measurement.p50_us for o in store.measurements() if o.measurement.problem.kernel == "toy"]
        builds = [b.config for b in store.builds(static_key("toy", STATIC)).values()]
    damaged = f"its {'device_props' if table == 'device' else column} is not UTF-8"
    if own_row != "1":
        assert 11.0 in winners
        assert 11.0 in seen
    if table == "winner":
        assert winners == [11.0]
        assert damaged in caplog.text
    elif table == "measurement":
        assert seen == [11.0]
        assert damaged in caplog.text
    elif (table, column) == ("build", "static_key"):
        assert builds == [{"block_n": 1}], "filed elsewhere: it is not found, and nothing else is lost"
    elif table == "build":
        assert builds == [{"block_n": 1}]
        assert damaged in caplog.text


@pytest.mark.parametrize(("statement", "says"), [
    ("UPDATE build SET config = json_set(config, '$.rows_per_block', 0)", "its own digest"),
    ("UPDATE build SET config = '[1]'", "cannot be read"),
    ("UPDATE build SET config = replace(printf('%.9999c', '['), '', '')", "cannot be read"),
    ("UPDATE winner SET latency_us = 'soon'", "its own seal"),
    ("UPDATE winner SET latency_us = -1", "its own seal"),
    ("UPDATE winner SET why = '7'", "its own seal"),
    ("UPDATE problem SET dynamic = dynamic + 1", "its problem does not match its digest"),
    ("UPDATE device SET props = replace(props, '132', '\"many\"')", "its device does not match its digest"),
    ("UPDATE artifact SET raw_bytes = 'many'", "does not match its own digest"),
    ("UPDATE winner SET problem_id = 'x'", "its problem is not there"),
    ("UPDATE device SET id = id || 'x'", "its device is not there"),
    ("UPDATE winner SET build_id = 'x'", "its build is not there"),
    ("UPDATE measurement SET id = id || 'x'", "its trial is not there"),
])  # fmt: skip
def test_a_damaged_winner_is_skipped_with_a_warning_that_names_it(
    path: Path, kerngen: Kerngen, caplog: pytest.LogCaptureFixture, statement: str, says: str
) -> None:
    """Through the command: an error in words, not a traceback."""
    with Store.open(path, read_only=True) as store:
        (winner,) = store.winners("rmsnorm")
    run(path, statement)
    code, _, err = kerngen("db", "show", "rmsnorm", "--arch", "sm90", "--db", str(path))
    assert code == 1, err
    assert "Traceback" not in err
    assert re.search("^(TuningMiss: no record for rmsnorm|CorruptRecord: )", err, re.MULTILINE), err
    told = err + caplog.text
    assert winner.id[:16] in told
    assert says in told
    assert "skipped" in told


@pytest.mark.parametrize(("statement", "command", "code", "says"), [
    ("UPDATE build SET entries = '{}' WHERE config LIKE '%:0}'", "dump -o text", 0, "build that cannot be read; s"),
    ("UPDATE build SET static_key = CAST(static_key || x'ff' AS TEXT) WHERE config LIKE '%:0}'", "gc", 0,
     "is no name of a line; skipped"),
    ("UPDATE line SET static_key = CAST(x'ff' AS TEXT) WHERE kernel = 'toy'", "verify", 1, "is no name of a line"),
    ("UPDATE problem SET static_key = CAST(x'ff' AS TEXT) WHERE dynamic = 64", "rm --kernel toy", 1,
     "tuning.db is damaged\n  restore a copy"),
], ids=lambda v: v.split()[0] if isinstance(v, str) else "")  # fmt: skip
def test_what_is_damaged_ends_no_command_in_a_traceback(
    kerngen: Kerngen, path: Path, caplog: pytest.LogCaptureFixture, statement: str, command: str, code: int, says: str
) -> None:
    run(path, statement)
    got, _, err = kerngen("db", *command.split(), *(["tuning.db"] if command == "verify" else ["--db", "tuning.db"]))
    assert got == code, err
    assert says in err + caplog.text


def _flip(path: Path, index: str, text: str = "") -> None:
    """A byte of an SQLite index's first page: that which says what it is, or the last of `text` in it."""
    with sqlite3.connect(path) as c:
        (page,) = c.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (index,)).fetchone()
        (size,) = c.execute("PRAGMA page_size").fetchone()
    c.close()
    data = bytearray(path.read_bytes())
    data[data.index(text.encode(), (page - 1) * size) + max(len(text) - 1, 0)] ^= 1
    path.write_bytes(data)


def test_a_row_that_its_index_has_lost_costs_its_own_winner(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Store.open(path, read_only=True) as store:
        first = next(o.id for o in store.measurements("toy"))
    _flip(path, "sqlite_autoindex_measurement_1", first)
    with Store.open(path) as store:
        assert len(store.recompute_winners("toy", key_of().static_key, Target.of(H200))) == 1
    assert "1 measurements of toy are damaged; their winners are skipped" in caplog.text


def test_gc_of_a_file_that_cannot_be_written_anew(kerngen: Kerngen, path: Path) -> None:
    _flip(path, "problem_by_static")
    code, out, err = kerngen("db", "gc", "--db", "tuning.db")
    assert (code, out, err.splitlines()[0]) == (1, "", "DatabaseError: tuning.db is damaged or cut short")


@pytest.mark.parametrize(("value", "why"), [(0, "rows_per_block=0 is none of 1, 2, 4, 8"), ("two", "TypeError: ")])
def test_values_that_todays_spec_breaks_on_end_no_command(
    value: object, why: str, kerngen: Kerngen, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole rows, as another version of the kernel may have written them: rmsnorm divides by `rows_per_block`."""
    kernel = find_kernel("rmsnorm")
    problem, target = kernel.problem_type(), Target.of(H200)
    sound = kernel.default_config(problem, target)
    source, config = render(kernel, problem, sound, target), fields_of(sound) | {"rows_per_block": value}
    with Store.open(kerngen.folder / "tuning.db") as store:
        build = store.add_build(compile_cubin(source, target.arch), "rmsnorm", source, config, static_fields(problem))
        key = problem_key(kernel, problem)
        seen = Measurement(key, "sm90", H200, config, build, "ok", "measured", p50_us=3.5, error_abs=0.0)
        store.add_measurement(seen)
        store.recompute_winners(kernel, key.static_key, target)
    assert kerngen("db", "explain", "rmsnorm", "--arch", "sm90", "--db", "tuning.db")[0] == 0
    assert re.search(f"winner .* for rmsnorm cannot run .*: {why}.*; skipped", caplog.text)
    assert kerngen("db", "report", "-o", "page.html", "--db", "tuning.db")[0] == 0
    code, out, _ = kerngen("db", "rebuild")
    assert code == 0
    assert re.search(rf"refused: rmsnorm on sm90 \(1\): .*{why}", out), out


def test_flipped_bits_never_raise_past_lookup(pristine: Path, tmp_path: Path) -> None:
    """Anywhere in the file: opening it may be refused, and asking it gives the winner or none."""
    kernel = find_kernel("rmsnorm")
    problem = kernel.problem_type()
    whole, path, random_bits = pristine.read_bytes(), tmp_path / "flipped.db", random.Random(7)
    with Store.open(pristine, read_only=True) as store:
        right = lookup([store], kernel, problem, Target.of(H200))
    assert right is not None
    refused = missed = served = 0
    for _ in range(400):
        flipped = bytearray(whole)
        for _ in range(random_bits.choice((1, 8))):
            flipped[random_bits.randrange(len(whole))] ^= 1 << random_bits.randrange(8)
        path.write_bytes(flipped)
        try:
            store = Store.open(path, read_only=True, sealed=True)
        except DatabaseError:
            refused += 1
            continue
        with store:
            found = lookup([store], kernel, problem, Target.of(H200))
        if found is None:
            missed += 1
            continue
        served += 1
        assert (found.config, found.build_id) == (right.config, right.build_id)
        assert found.cubin is None or found.cubin.image == right.cubin.image  # type: ignore[union-attr]
    assert min(refused, missed, served) > 0, (refused, missed, served)


@pytest.mark.parametrize("forge", ["no entry points", "entry points of another", "machine code of another"])
def test_machine_code_of_another_kernel_is_not_served(path: Path, forge: str, caplog: pytest.LogCaptureFixture) -> None:
    """Though all digests hold: whoever writes rows can make those, too."""
    kernel, other = find_kernel("rmsnorm"), find_kernel("gelu_gate")
    problem, target = kernel.problem_type(), Target.of(H200)
    theirs = other.problem_type()
    taken = compile_cubin(render(other, theirs, other.default_config(theirs, target), target), target.arch)
    with Store.open(path) as store:
        winner = lookup([store], kernel, problem, target)
        assert winner is not None
        assert winner.cubin is not None
        build = store.build(winner.build_id)
        if forge == "machine code of another":
            forged = replace(build, image_sha=hashlib.sha256(taken.image).hexdigest())
        else:
            forged = replace(build, entries={} if forge == "no entry points" else taken.entries)
        entries = {name: asdict(r) for name, r in forged.entries.items()}
        with store.writing() as connection:
            values = {"image_sha": forged.image_sha, "entries": to_json(entries), "seal": _seal(forged, entries)}
            connection.execute(t.build.update().where(t.build.c.id == build.id).values(values))
            if forge == "machine code of another":
                blob = zstandard.ZstdCompressor().compress(taken.image)
                row = {"sha": forged.image_sha, "kind": "cubin", "codec": "zstd", "raw_bytes": len(taken.image)}
                connection.execute(t.artifact.insert(), row | {"blob": blob})
        store.rewrite_lines()
    for source in (Store.open(path, read_only=True), Reader.open(path)):
        assert source is not None
        with source:
            caplog.clear()
            assert lookup([source], kernel, problem, target) is None
            assert "it is of another kernel" in caplog.text
