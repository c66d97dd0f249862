"""Databases of older schemas: brought up in one transaction, or read as they are.

schema1.sqlite was written by the last kerngen that wrote schema 1: a part of what it shipped for an H200, predictions
of two searches that differ in their seed, a kernel that is not installed here, revocations, and two damaged rows.
Schema 2 is tested with what its own migration made of that file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zstandard
from sqlalchemy import MetaData, create_engine, inspect, select
from test_tuning_db import H200
from test_tuning_db_identity import FILED, REQUIRED

from kerngen.arch import Target
from kerngen.errors import CorruptRecord, DatabaseError
from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.kernel import defaults_of, trimmed
from kerngen.tuning_db import Store, lookup, problem_key
from kerngen.tuning_db.store import migrate
from kerngen.tuning_db.store.rows import build_id_of, winner_id_of

SCHEMA_1 = Path(__file__).parent / "schema1.sqlite"
TABLES = ("artifact", "build", "problem", "device", "environment", "measurement", "revocation", "winner")


def query(path: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as c:
        return c.execute(statement).fetchall()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(SCHEMA_1, tmp_path / "tuning.db"))


@pytest.fixture
def path2(path: Path) -> Path:
    """The same file in schema 2."""
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        migrate.upgrade(connection, to="0002")
    engine.dispose()
    return path


@pytest.fixture
def server(postgresql_url: str) -> str:
    """The same rows on a PostgreSQL server, in its schema 1."""
    source, target = create_engine(f"sqlite:///{SCHEMA_1}"), create_engine(postgresql_url)
    with source.connect() as old, target.begin() as new:
        migrate.upgrade(new, to="0001")
        tables = MetaData()
        tables.reflect(old, only=TABLES)
        for table in tables.sorted_tables:
            if rows := [dict(r._mapping) for r in old.execute(select(table))]:
                new.execute(table.insert(), rows)
    source.dispose()
    target.dispose()
    return postgresql_url


@pytest.fixture(params=["sqlite", "sqlite, schema 2", "postgresql"])
def migrated(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Of schema 1, brought up by all migrations; or of schema 2, by those since."""
    kinds = {"sqlite": "path", "sqlite, schema 2": "path2", "postgresql": "server"}
    place = request.getfixturevalue(kinds[request.param])
    with Store.open(place) as store:
        yield store


# Fields of kernels that were there in schema 1, added since with a default that means what was done before.
ADDED_SINCE = {
    *(("attn_decode", name)
      for name in ("source", "num_rotated_pairs", "together", "warpgroups", "cluster", "key_parts", "push_bits",
                   "in_flight", "prefetch")),
    *(("attn_prefill", name) for name in ("wgmma", "ping_pong", "boxes", "cluster", "split", "ends", "lists")),
    *(("w4a16_gemm", name)
      for name in ("gated", "gemv", "row_invariant", "split_k", "stream", "warpgroups", "cluster", "prefetch",
                   "in_flight", "shared_ring", "throughout", "weights", "fp16_scales", "tma_mma", "activation")),
    *((kernel, name) for kernel in ("attn_decode", "attn_prefill", "qkv_norm_rope")
      for name in ("page_heads", "kv_format")),
    *((kernel, "has_bounds") for kernel in ("add_norm", "gelu_gate")),
    *((kernel, name) for kernel in ("draft_inputs", "embed", "greedy_head") for name in ("table", "group_size")),
    ("attn_decode", "causal"), ("gelu_gate", "activation"), ("qkv_norm_rope", "v_norm"), ("qkv_norm_rope", "row_heads"),
    ("qkv_norm_rope", "num_layers"),
}  # fmt: skip


def said_in_schema_1() -> dict[tuple[Any, ...], Any]:
    """Of each winner what it says, all fields of its problem and configuration included, and its machine code."""
    rows = query(SCHEMA_1, """
        SELECT p.kernel, p.static, p.runtime, p.dynamic, w.arch, d.name, b.config, w.provenance, w.latency_us, w.margin,
               w.reason, m.fields, a.blob
        FROM winner w JOIN problem p ON p.id = w.problem_id JOIN device d ON d.id = w.device_id
             JOIN build b ON b.id = w.build_id JOIN measurement m ON m.id = w.measurement_id
             LEFT JOIN artifact a ON a.sha = b.image_sha""")  # fmt: skip
    return {
        (kernel, static, runtime, *rest): None if blob is None else zstandard.decompress(blob)
        for kernel, static, runtime, *rest, blob in rows
    }


def says(store: Store) -> dict[tuple[Any, ...], Any]:
    def text(value: Any) -> str:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    def then(kernel: str, fields: Mapping[str, Any]) -> str:
        return text({name: value for name, value in fields.items() if (kernel, name) not in ADDED_SINCE})

    found = {}
    for w in store.winners():
        p, image = w.problem, store.image(store.build(w.build_id))
        config = w.config
        if p.kernel in FILED:  # with the flags that rows have for a body
            filed = trimmed(config, defaults_of(find_kernel(p.kernel).config_type))
            config = {k: filed.get(k, v) for k, v in FILED[p.kernel][2].items()}
        found[p.kernel, then(p.kernel, p.static), text(p.runtime), p.dynamic, w.arch.name, w.device.name,
              then(p.kernel, config), w.provenance, w.latency_us, w.margin, w.reason, then(p.kernel, p.fields)] = (
                  None if image is None else image.image)  # fmt: skip
    return found


def test_the_same_winners_with_the_same_machine_code(migrated: Store) -> None:
    before = said_in_schema_1()
    (damaged,) = [w for w in before if w[0] == "toy" and w[5] == "H200"]
    del before[damaged]
    assert says(migrated) == before
    assert sum(image is not None for image in before.values()) == 7
    assert {kernel for kernel, *_ in before} <= {*kernel_names(), "toy"}


def test_ids_are_those_of_today(migrated: Store) -> None:
    for o in migrated.measurements():  # each was checked against its own digest
        key = o.measurement.problem
        if key.kernel != "toy":
            kernel = find_kernel(key.kernel)
            assert problem_key(kernel, kernel.problem_type(**key.fields)) == key
        assert [m.id for m in migrated.measurements(problem=key)].count(o.id) == 1
        for b in migrated.builds(key.static_key).values():
            assert b.id == build_id_of(b.kernel, b.target, b.nvrtc, b.options, b.config, b.static, b.source_sha)
    for w in migrated.winners():
        assert w.id == winner_id_of(w.problem, w.arch.name, w.device, w.closure)
        assert migrated.winners(static_key=w.problem.static_key, arch=w.arch, device=w.device, cell=w.problem.cell)


def test_no_row_is_lost(migrated: Store, caplog: pytest.LogCaptureFixture) -> None:
    """But a damaged winner, which can be computed anew, and predictions that a second search repeated."""
    with migrated.engine.connect() as c:
        tables = MetaData()
        tables.reflect(c)
        now = {name: len(c.execute(select(tables.tables[name])).all()) for name in (*TABLES, "search", "former")}
    was = {name: query(SCHEMA_1, f"SELECT count(*) FROM {name}")[0][0] for name in TABLES}
    assert now == was | {
        "measurement": was["measurement"] - 6,
        "winner": was["winner"] - 1,
        "search": 4,
        # by their names of schema 1, and measurements by those of schema 2 too: all but the damaged ones
        "former": was["build"] - 1 + was["measurement"] - 1 + was["measurement"] - 6 - 1,
    }
    assert [o.measurement.run for o in migrated.measurements(provenance="predicted")] == ["r0", "r0"]
    for seed in range(2):
        assert [s["tried"] for s in migrated.closed_searches(f"seed {seed}").values()] == [1, 1]


def test_damage_is_not_laundered(migrated: Store, caplog: pytest.LogCaptureFixture) -> None:
    (altered,) = query(SCHEMA_1, "SELECT id FROM measurement WHERE p50_us = 1.0")[0]
    (build,) = query(SCHEMA_1, "SELECT id FROM build WHERE config LIKE '%77%'")[0]
    assert not [o for o in migrated.measurements("toy") if o.measurement.p50_us == 1.0]
    assert f"measurement {altered} does not match its own digest" in caplog.text
    with pytest.raises(CorruptRecord, match="its own digest"):
        migrated.build(build)


@pytest.mark.parametrize("damage", [
    "DELETE FROM build WHERE kernel = 'rmsnorm' AND static NOT LIKE '%1024%'",
    "DELETE FROM problem WHERE kernel = 'embed'",
    "DELETE FROM device WHERE name = 'H100'",
    "UPDATE winner SET provenance = 'guessed' WHERE kernel = 'embed'",
    "UPDATE winner SET latency_us = 'soon' WHERE kernel = 'embed'",
    "UPDATE measurement SET tags = '{' WHERE run = 'r0'",
    "UPDATE measurement SET id = CAST(id || x'ff' AS TEXT) WHERE run = 'r0'",
    "UPDATE problem SET static = '[' WHERE kernel = 'embed'",
])  # fmt: skip
def test_a_damaged_row_does_not_hold_up_the_others(path: Path, damage: str) -> None:
    with closing(sqlite3.connect(path)) as c, c:  # without foreign keys and checks, as damage knows none
        c.execute("PRAGMA ignore_check_constraints = ON")
        assert c.execute(damage).rowcount > 0
    with Store.open(path) as store:
        found = {(w.kernel, w.device.name, w.latency_us) for w in store.winners()}
    others = {
        (w[0], w[5], w[8]) for w in said_in_schema_1() if w[:1] + w[5:6] not in (("toy", "H200"), ("toy", "H100"))
    }
    lost = {kernel for kernel, *_ in others - found}
    assert lost <= {"rmsnorm", "embed", "moe_route"}
    assert len(lost) <= (2 if "r0" in damage else 1)


def test_what_was_revoked_stays_revoked(migrated: Store, tmp_path: Path) -> None:
    """A revocation may name a row of another database, by what it was called when both had schema 1."""
    was_build, was_trial = (
        query(SCHEMA_1, f"SELECT subject_id FROM revocation WHERE reason = '{reason}'")[0][0]
        for reason in ("hangs", "was another GPU")
    )
    revoked = migrated.revoked()
    assert {revoked[id] for id in migrated.renamed([was_build, was_trial])} == {"hangs", "was another GPU"}
    assert not {was_build, was_trial} & revoked.keys()
    assert revoked["0" * 64] == "of a build that is in another database"

    kernel, target = find_kernel("rmsnorm"), Target.of(H200)
    winner = next(w for w in migrated.winners("rmsnorm", device="H200") if w.provenance == "measured")
    problem = kernel.problem_type(**winner.problem.fields)
    assert lookup([migrated], kernel, problem, target) is not None
    (was,) = query(SCHEMA_1, f"SELECT build_id FROM winner WHERE latency_us = {winner.latency_us!r}")[0]
    with Store.open(tmp_path / "mine.db") as mine:
        mine.revoke(was, "wrong on driver 580.1")
        assert lookup([mine, migrated], kernel, problem, target) is None


def test_why_names_only_builds_that_are_here(migrated: Store) -> None:
    """The shipped losers are not: what they would be called now, nobody knows."""
    briefs = [w.why[which] for w in migrated.winners() for which in ("fastest", "next") if w.why[which] is not None]
    assert all(brief["us"] > 0 and brief["config"] for brief in briefs)
    named = [brief["build_id"] for brief in briefs if "build_id" in brief]
    assert 0 < len(named) < len(briefs)
    for id in named:
        migrated.build(id)


def test_what_schema_2_called_a_trial_stays_revoked(path2: Path, tmp_path: Path) -> None:
    """In this database, and in one that is read beside it."""
    ids = query(
        path2, "SELECT measurement_id, latency_us FROM winner WHERE kernel = 'rmsnorm' AND provenance = 'measured'"
    )
    was, latency_us = ids[0]
    with closing(sqlite3.connect(path2)) as c, c:
        id = hashlib.sha256(json.dumps({"v": 2, "subject": was, "reason": "hot"}, sort_keys=True,
                                       separators=(",", ":")).encode()).hexdigest()  # fmt: skip
        c.execute("INSERT INTO revocation VALUES (?, ?, 'hot', 'then')", (id, was))
    with Store.open(path2) as store, Store.open(tmp_path / "mine.db") as mine:
        (now,) = store.renamed([was])
        assert store.revoked()[now] == "hot"
        assert was not in store.revoked()
        (seen,) = [o for o in store.measurements("rmsnorm") if o.id == now]
        assert seen.measurement.p50_us == latency_us
        mine.revoke(was, "hot")
        assert store.renamed(mine.revoked()) == {now}


@pytest.mark.parametrize("change", [
    "latency_us = latency_us / 2", "latency_us = latency_us * 2",
    "measurement_id = (SELECT id FROM measurement WHERE kernel_of = 'embed')",
    "build_id = (SELECT id FROM build WHERE kernel = 'embed' LIMIT 1)", "provenance = 'predicted'",
    "cell = static_key", "id = 'x' || id",
])  # fmt: skip
def test_a_winner_that_was_altered_before_there_were_seals_is_not_sealed(
    path2: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As far as it contradicts its figures and what it rests on."""
    (id, static_key) = query(path2, "SELECT id, static_key FROM winner WHERE kernel = 'rmsnorm' AND margin > 0")[0]
    of_embed = "(SELECT m.id FROM measurement m JOIN problem p ON p.id = m.problem_id WHERE p.kernel = 'embed' LIMIT 1)"
    change = change.replace("(SELECT id FROM measurement WHERE kernel_of = 'embed')", of_embed)
    with closing(sqlite3.connect(path2)) as c, c:
        num_winners = c.execute("SELECT count(*) FROM winner").fetchone()[0]
        assert c.execute(f"UPDATE winner SET {change} WHERE id = '{id}'").rowcount == 1
    with Store.open(path2) as store:
        assert id not in [w.id for w in store.winners(static_key=static_key)]
        assert len(store.winners()) == num_winners - 1
    assert "is damaged (it does not match what it rests on) and not migrated" in caplog.text


def _dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as c:
        return list(c.iterdump())


def test_migrating_twice_is_nothing(path: Path) -> None:
    Store.open(path).close()
    once = _dump(path)
    Store.open(path).close()
    assert _dump(path) == once


@pytest.mark.parametrize(("of", "at"), [
    *(("path", at) for at in ("CREATE TABLE former", "INSERT INTO winner", "DELETE FROM measurement",
                              "UPDATE kerngen")),
    *(("path2", at) for at in ("ALTER TABLE winner", "UPDATE measurement", "INSERT INTO winner", "UPDATE search",
                               "INSERT INTO former", "UPDATE kerngen")),
])  # fmt: skip
def test_a_migration_that_is_killed_leaves_the_old_database(of: str, at: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(of)
    before = _dump(path)
    code = f"""
import os, signal, sys
from sqlalchemy import Engine, event
from kerngen.tuning_db import Store

@event.listens_for(Engine, "before_cursor_execute")
def _(connection, cursor, statement, *more):
    if statement.strip().startswith({at!r}):
        os.kill(os.getpid(), signal.SIGKILL)

Store.open(sys.argv[1])
"""
    killed = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert _dump(path) == before
    with Store.open(path) as store:
        assert len(store.winners()) == len(said_in_schema_1()) - 1


def test_a_row_that_lacked_a_field_is_the_row_that_has_its_default(path: Path) -> None:
    """Schema 1 told them apart. A kernel that gained a field had both."""
    static, id = query(path, "SELECT static, id FROM build WHERE kernel = 'rmsnorm' LIMIT 1")[0]
    older = {k: v for k, v in json.loads(static).items() if k != "has_weight"}
    assert older != json.loads(static)

    def digest(value: Any) -> str:
        return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    key = digest({"v": 1, "kernel": "rmsnorm", "static": older})
    cell = digest({"v": 1, "kernel": "rmsnorm", "static": older, "runtime": {}})
    with closing(sqlite3.connect(path)) as c, c:
        for dynamic in (1, 16):
            problem = digest({"v": 1, "cell": cell, "dynamic": dynamic})
            row = (problem, "rmsnorm", key, json.dumps(older, sort_keys=True), cell, "{}", dynamic)
            c.execute("INSERT INTO problem VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    with Store.open(path) as store:
        assert store.build(store.renamed([id]).pop()).static == json.loads(static)
    keys = query(path, "SELECT DISTINCT static_key FROM problem WHERE kernel = 'rmsnorm' AND static NOT LIKE '%1024%'")
    assert len(keys) == 1


# ---- read-only


@pytest.mark.parametrize("sealed", [True, False])
def test_reading_leaves_the_file_as_it_is(path: Path, sealed: bool, caplog: pytest.LogCaptureFixture) -> None:
    before = path.read_bytes()
    with caplog.at_level(logging.INFO, "kerngen.tuning_db"), Store.open(path, sealed=sealed, read_only=True) as store:
        read = says(store)
        with pytest.raises(DatabaseError, match="read-only"):
            store.revoke("x", "y")
        again = Store.open(path, sealed=sealed, read_only=True)
        assert says(again) == read, "two copies are two databases"
        again.close()
        assert says(store) == read
    assert "has schema 0001" in caplog.text
    assert "the file stays as it is" in caplog.text
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    with Store.open(path) as store:
        assert says(store) == read


def test_a_file_with_a_log_beside_it_is_read_whole(path: Path) -> None:
    """What another process wrote, and did not yet fold into the file."""
    with closing(sqlite3.connect(path)) as c:
        c.execute("PRAGMA journal_mode = wal")
        c.execute("INSERT INTO revocation VALUES ('a', 'b', 'late', 'now')")
        c.commit()
        with Store.open(path, read_only=True) as store:
            assert store.revoked()["b"] == "late"


def test_many_threads_read_one_copy(path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with Store.open(path, sealed=True) as store, ThreadPoolExecutor(8) as pool:
        expected = says(store)
        assert all(found == expected for found in pool.map(lambda _: says(store), range(24)))


def test_a_server_is_not_migrated_by_reading(server: str) -> None:
    with pytest.raises(DatabaseError, match="schema 0001") as caught:
        Store.open(server, read_only=True)
    assert "open it once to write" in str(caught.value)
    engine = create_engine(server)
    with engine.connect() as c:
        assert migrate.revision(c) == "0001"
        assert "former" not in inspect(c).get_table_names()
    engine.dispose()


# ---- the migration itself


def test_the_migration_rests_on_defaults_that_still_hold() -> None:
    """It has them in its own words. What was filed by others would be found no more."""
    scripts = migrate._scripts()
    revision = scripts.get_revision("0002")
    defaults = revision.module._DEFAULTS
    assert set(defaults) <= set(FILED)
    for name, (problem, config) in defaults.items():
        runtime, static, now = FILED[name]
        pinned = {k: v for k, v in (runtime | static).items() if v != REQUIRED}
        for before, after in ((problem, pinned), (config, now)):
            assert {k: (type(v), v) for k, v in before.items()}.items() <= {
                k: (type(v), v) for k, v in after.items()
            }.items()
