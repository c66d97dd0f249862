"""The tuning database as a store: what is written is read back, and what is damaged is noticed."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import CheckConstraint, event, inspect, make_url, text
from sqlalchemy.exc import IntegrityError

from kerngen.arch import Target, find_arch, find_device
from kerngen.compiler.compile import DEFAULT_OPTIONS, Cubin, Ptx, Resources, cache_key, source_key
from kerngen.errors import CorruptRecord, DatabaseError, UsageError
from kerngen.tuning_db import Measurement, ProblemKey, Store
from kerngen.tuning_db.read.ids import canonical, digest
from kerngen.tuning_db.read.values import StepKey
from kerngen.tuning_db.store import engine as engines
from kerngen.tuning_db.store import migrate, schema

SM90, H200, H100 = find_arch("sm90"), find_device("H200"), find_device("H100")
OPTIONS = DEFAULT_OPTIONS
STATIC = {"head_dim": 128, "dtype": "bf16"}


def source_of(n: int) -> str:
    return f"int source = {n};\n"


def make_cubin(n: int = 0, spills: int = 0) -> Cubin:
    key = cache_key(source_of(n), SM90.nvrtc_target, OPTIONS, (12, 9))
    image = f"machine code {n}".encode() * 500
    return Cubin(key, "sm90", (12, 9), image, {"toy": Resources(40 + n, spills, spills, 0, 1024)}, "log")


def add_build(store: Store, n: int = 0, *, spills: int = 0, **options: Any) -> str:
    config = {"block_n": n}
    return store.add_build(make_cubin(n, spills), "toy", source_of(n), config, STATIC, options=OPTIONS, **options)


def key_of(dynamic: int | None = 64, batch: int = 8) -> ProblemKey:
    fields = {**STATIC, "batch": batch, "num_tokens": dynamic}
    return ProblemKey("toy", STATIC, {"batch": batch}, dynamic, fields)


def measured(build_id: str | None, n: int, us: float | None, **values: Any) -> Measurement:
    """A measured trial of configuration n on an H200; `ok` unless told otherwise."""
    values = {"outcome": "ok", "provenance": "measured", "error_abs": 1e-3, "device": H200, **values}
    problem = values.pop("problem", key_of())
    return Measurement(problem, "sm90", config={"block_n": n}, build_id=build_id, p50_us=us, **values)


def predicted(build_id: str, n: int, us: float, **values: Any) -> Measurement:
    return measured(build_id, n, us, **{"provenance": "predicted", "model": "roofline-1", "error_abs": None, **values})


@pytest.fixture
def store(path: Path) -> Any:
    with Store.open(path) as s:
        yield s


@pytest.fixture(params=["sqlite", "postgresql"])
def any_store(request: pytest.FixtureRequest, path: Path) -> Iterator[Store]:
    """The tests that take this are the contract of every kind of database."""
    with Store.open(path if request.param == "sqlite" else request.getfixturevalue("postgresql_url")) as s:
        yield s


# ---- builds


def test_a_build_comes_back_as_it_went_in(any_store: Store) -> None:
    cubin = make_cubin(3)
    build = any_store.build(add_build(any_store, 3))
    assert (build.config, build.static, build.nvrtc, build.options) == ({"block_n": 3}, STATIC, (12, 9), OPTIONS)
    assert build.entries == cubin.entries
    assert build.image_sha == hashlib.sha256(cubin.image).hexdigest()
    assert any_store.image(build) == replace(cubin, log="")
    for n, expected in ((3, build), (4, None)):
        found = any_store.find_build("toy", source_of(n), {"block_n": 3}, STATIC, SM90, options=OPTIONS, nvrtc=(12, 9))
        assert found == expected


def test_the_same_build_twice_is_one(any_store: Store) -> None:
    assert add_build(any_store) == add_build(any_store)
    with any_store.engine.connect() as c:
        assert c.execute(text("SELECT count(*) FROM build")).scalar() == 1


def test_an_image_may_be_kept_later(any_store: Store) -> None:
    build = any_store.build(add_build(any_store, keep_image=False))
    assert any_store.image(build) is None
    any_store.keep_image(make_cubin())
    assert any_store.image(build) == replace(make_cubin(), log="")


def test_ptx_is_a_build_too(any_store: Store) -> None:
    ptx = Ptx(source_key("int p;\n", "compute_90", OPTIONS), "sm90", (12, 9), b".version 8.8\n\0")
    build = any_store.build(any_store.add_build(ptx, "toy", "int p;\n", {}, STATIC, options=OPTIONS))
    assert build.target == "compute_90"
    assert any_store.image(build) == ptx


def test_an_image_of_another_source_is_refused(any_store: Store) -> None:
    with pytest.raises(DatabaseError, match="from this source"):
        any_store.add_build(make_cubin(1), "toy", source_of(2), {}, STATIC, options=OPTIONS)
    with pytest.raises(DatabaseError, match="from this source"):
        any_store.add_build(make_cubin(1), "toy", source_of(1), {}, STATIC, options=("-G",))


def test_a_failed_build_is_a_row_until_it_succeeds(any_store: Store) -> None:
    failed = any_store.add_build(
        None, "toy", source_of(0), {"block_n": 0}, STATIC, arch=SM90, options=OPTIONS, nvrtc=(12, 9),
        status="compile_failed", log="error: no",
    )  # fmt: skip
    assert any_store.build(failed).log == "error: no"
    assert any_store.image(any_store.build(failed)) is None
    assert add_build(any_store) == failed
    assert any_store.build(failed).status == "ok"
    assert any_store.image(any_store.build(failed)) is not None


def test_other_machine_code_from_the_same_source_is_corruption(any_store: Store) -> None:
    add_build(any_store)
    with pytest.raises(CorruptRecord, match="other machine code"):
        any_store.add_build(replace(make_cubin(), image=b"x"), "toy", source_of(0), {"block_n": 0}, STATIC,
                        options=OPTIONS)  # fmt: skip


def damage(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as c:
        assert c.execute(statement).rowcount > 0
    c.close()


@pytest.mark.parametrize("statement", [
    "UPDATE artifact SET blob = substr(blob, 1, length(blob) - 3)",
    "UPDATE artifact SET blob = zeroblob(60)",
    "UPDATE artifact SET raw_bytes = raw_bytes + 1",
    "UPDATE artifact SET codec = 'lzma'",
])  # fmt: skip
def test_a_damaged_blob_is_named(store: Store, path: Path, statement: str) -> None:
    build = store.build(add_build(store))
    damage(path, statement)
    with pytest.raises(CorruptRecord, match=build.id):
        store.image(build)


@pytest.mark.parametrize("statement", [
    "UPDATE build SET config = '{\"block_n\":9}'", "UPDATE build SET entries = replace(entries, '40', '41')",
    "UPDATE build SET entries = '{'", "UPDATE build SET image_sha = 'abc'", "UPDATE build SET nvrtc = '13'",
])  # fmt: skip
def test_a_damaged_build_is_named(store: Store, path: Path, statement: str) -> None:
    build_id = add_build(store)
    damage(path, statement)
    with pytest.raises(CorruptRecord, match=build_id):
        store.build(build_id)


# ---- measurements


def test_a_measurement_comes_back_as_it_went_in(any_store: Store) -> None:
    m = measured(
        add_build(any_store), 0, 12.25, p10_us=12.0, p90_us=13.0, min_us=11.9, samples=200, error_rel=0.1,
        stage="final", environment={"driver": "580.1", "l2": "cold", "clock": 1830.5}, run="r1", tags={"rank": 1},
        at="2026-01-02T03:04:05+00:00",
    )  # fmt: skip
    id = any_store.add_measurement(m)
    (o,) = any_store.measurements("toy")
    assert (o.id, o.measurement) == (id, m)
    assert o.measurement.problem.fields == m.problem.fields


def test_every_outcome_is_a_row(any_store: Store) -> None:
    build = add_build(any_store)
    for outcome in ("invalid", "compile_failed", "wrong_result", "launch_failed", "timed_out"):
        nan = float("nan") if outcome == "wrong_result" else None
        any_store.add_measurement(measured(build, 0, None, outcome=outcome, reason="why", error_abs=nan))
    any_store.add_measurement(measured(None, 0, None, outcome="invalid", reason="needs 300,000 B"))
    rows = any_store.measurements(outcome="invalid")
    assert sorted(o.measurement.reason for o in rows) == ["needs 300,000 B", "why"]
    assert len(any_store.measurements()) == 6


def test_repeating_a_measurement_adds_a_row_and_repeating_a_prediction_does_not(any_store: Store) -> None:
    """A prediction is the same fact whoever asks, and whatever for."""
    build = add_build(any_store)
    for run in ("a", "b"):
        any_store.add_measurement(measured(build, 0, 12.0, run=run))
        why = {"tags": {"search": run}, "reason": f"best of search {run}"}
        any_store.add_measurement(predicted(build, 0, 12.0, run=run, **why))
    assert len(any_store.measurements(provenance="measured")) == 2
    assert len(any_store.measurements(provenance="predicted")) == 1


def test_finished_searches_are_noted(any_store: Store) -> None:
    for search in ("a", "b"):
        for _ in range(2):
            any_store.close_search(search, key_of(), {"tried": 7})
    any_store.close_search("a", key_of(128), {"tried": 8})
    assert any_store.closed_searches("a") == {key_of().id: {"tried": 7}, key_of(128).id: {"tried": 8}}
    assert any_store.closed_searches("b") == {key_of().id: {"tried": 7}}
    assert any_store.closed_searches("c") == {}


@pytest.mark.parametrize(("values", "says"), [
    ({"outcome": "fine"}, "not one of ok, invalid"), ({"provenance": "guessed"}, "not one of measured"),
    ({"outcome": "timed_out"}, "needs its reason"), ({"us": None}, "positive p50_us"),
    ({"us": float("nan")}, "positive p50_us"), ({"us": 0.0}, "positive p50_us"), ({"error_abs": None}, "error_abs"),
    ({"provenance": "predicted"}, "its model"), ({"build_id": None}, "build_id"),
])  # fmt: skip
def test_a_measurement_that_says_too_little_is_refused(values: dict[str, Any], says: str) -> None:
    values = {"us": 1.0, "build_id": "b", **values}
    with pytest.raises(DatabaseError, match=says):
        measured(values.pop("build_id"), 0, values.pop("us"), **values)


def test_filters(any_store: Store) -> None:
    one, two = add_build(any_store, 1), add_build(any_store, 2)
    any_store.add_measurements([
        measured(one, 1, 10.0, run="a"),
        measured(two, 2, 11.0, run="b", device=H100),
        predicted(two, 2, 9.0, problem=key_of(128)),
    ])  # fmt: skip
    assert len(any_store.measurements(problem=key_of(128))) == 1
    assert len(any_store.measurements(static_key=key_of().static_key)) == 3
    assert [o.measurement.build_id for o in any_store.measurements(device=H100)] == [two]
    assert [o.measurement.build_id for o in any_store.measurements(run="a", arch=SM90)] == [one]
    assert len(any_store.measurements(build_id=two)) == 2
    assert any_store.measurements("other") == any_store.measurements(arch="sm70") == []


def test_a_transaction_lands_whole_or_not_at_all(store: Store, path: Path) -> None:
    def half() -> None:
        with store.transaction():
            store.add_measurement(measured(add_build(store), 0, 12.0))
            assert len(store.measurements()) == 1
            with Store.open(path, read_only=True) as other:
                assert other.measurements() == [], "seen before it was committed"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert store.measurements() == []
    with pytest.raises(UsageError, match="no build"):
        store.build("x")


# ---- winners


def test_winners_are_recomputed(any_store: Store) -> None:
    builds = [add_build(any_store, n) for n in range(3)]
    for n, us in enumerate((20.0, 10.0, 15.0)):
        any_store.add_measurement(measured(builds[n], n, us))
    (w,) = any_store.recompute_winners("toy", key_of().static_key, Target.of(H200))
    assert (w.config, w.latency_us, w.provenance, w.build_id) == ({"block_n": 1}, 10.0, "measured", builds[1])
    assert w.margin == pytest.approx(0.5)
    assert "fastest of 3 measured" in w.reason
    assert any_store.winner(w.id[:12]) == w
    assert any_store.winners("toy", device=H200) == [w]
    assert any_store.winners("toy", device=H100) == []

    any_store.revoke(builds[1], "reads past the page table")
    (w,) = any_store.recompute_winners("toy", key_of().static_key, Target.of(H200))
    assert w.config == {"block_n": 2}
    for build in builds:
        any_store.revoke(build, "all of them")
    assert any_store.recompute_winners("toy", key_of().static_key, Target.of(H200)) == any_store.winners() == []


def test_recomputing_touches_one_device_and_every_point(any_store: Store) -> None:
    build = add_build(any_store)
    for dynamic in (1, 64):
        for device in (H100, H200):
            any_store.add_measurement(measured(build, 0, 5.0, problem=key_of(dynamic), device=device))
    for device in (H100, H200):
        found = any_store.recompute_winners("toy", key_of().static_key, Target.of(device))
        assert [(w.problem.dynamic, w.device.name) for w in found] == [(1, device.name), (64, device.name)]
    assert len(any_store.winners()) == 4


def test_a_wrong_result_anywhere_bars_the_source(any_store: Store) -> None:
    fast, slow = add_build(any_store, 1), add_build(any_store, 2)
    any_store.add_measurements([measured(fast, 1, 10.0), measured(slow, 2, 20.0)])
    wrong = measured(fast, 1, None, problem=key_of(4096), device=H100, outcome="wrong_result", reason="off by 3")
    id = any_store.add_measurement(wrong)
    (w,) = any_store.recompute_winners("toy", key_of().static_key, Target.of(H200))
    assert w.build_id == slow
    any_store.revoke(id, "the reference was wrong")
    (w,) = any_store.recompute_winners("toy", key_of().static_key, Target.of(H200))
    assert w.build_id == fast


def test_winners_of_a_static_key_cost_one_query_that_uses_the_index(store: Store) -> None:
    """What the runtime asks once for each kernel of a model; `cell` is what a lookup asks."""
    build = add_build(store)
    store.add_measurements([measured(build, 0, 5.0, problem=key_of(n, batch)) for n in (1, 64) for batch in (1, 8)])
    store.recompute_winners("toy", key_of().static_key, Target.of(H200))
    said: list[tuple[str, Any]] = []

    @event.listens_for(store.engine, "before_cursor_execute")
    def _(connection: Any, cursor: Any, sql: str, values: Any, *more: Any) -> None:
        if sql != "BEGIN":
            said.append((sql, values))

    for key, winners, index in (
        ({"static_key": key_of().static_key}, 4, "static"),
        ({"cell": key_of().cell}, 2, "cell"),
    ):
        said.clear()
        assert len(store.winners("toy", arch="sm90", **key)) == winners
        ((sql, values),) = said
        with sqlite3.connect(store.where) as c:
            plan = [row[3] for row in c.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
        c.close()
        assert any(f"winner_by_{index}" in step for step in plan), plan
        assert not [step for step in plan if step.startswith("SCAN")], plan


def test_no_such_winner(any_store: Store) -> None:
    with pytest.raises(UsageError, match="no winner"):
        any_store.winner("%")


# ---- files


def test_reading_only(store: Store, path: Path, tmp_path: Path) -> None:
    build = add_build(store)
    store.close()
    sealed = tmp_path / "sealed" / "db.sqlite"
    sealed.parent.mkdir()
    shutil.copy(path, sealed)
    before = sealed.read_bytes()
    with Store.open(sealed, sealed=True) as shipped:
        assert shipped.image(shipped.build(build)) is not None
        with pytest.raises(DatabaseError, match="read-only"):
            add_build(shipped, 2)
    assert sealed.read_bytes() == before
    assert [p.name for p in sealed.parent.iterdir()] == ["db.sqlite"], "side files beside a sealed database"


def test_the_file_alone_holds_everything_once_a_writer_closed_it(store: Store, path: Path, tmp_path: Path) -> None:
    """Even where someone else has it open, so that SQLite keeps its write-ahead log."""
    with Store.open(path, read_only=True) as reader:
        assert reader.revoked() == {}
        for n in range(50):
            store.revoke(f"x{n}", "y")
        store.close()
        shutil.copy(path, tmp_path / "copy.db")
    with Store.open(tmp_path / "copy.db", read_only=True) as copied:
        assert len(copied.revoked()) == 50


def test_a_reader_sees_what_a_writer_committed(store: Store, path: Path) -> None:
    """Even one that began when nobody was writing."""
    store.close()
    assert not path.with_name("tuning.db-wal").exists()
    with Store.open(path, read_only=True) as reader:
        assert reader.revoked() == {}
        with Store.open(path) as writer:
            for n in range(50):
                writer.revoke(f"x{n}", "y")
            assert len(reader.revoked()) == 50
        assert len(reader.revoked()) == 50


def test_a_read_only_disk_is_one_clear_line(store: Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_build(store)
    store.close()
    real = sqlite3.connect
    monkeypatch.setattr(
        "kerngen.tuning_db.store.engine.sqlite3.connect",
        lambda name, **options: real(name.replace("mode=rwc", "mode=ro&immutable=1"), **options),
    )  # what the file system's refusal looks like to SQLite; root may write anywhere
    with Store.open(path) as there, pytest.raises(DatabaseError, match=r"tuning\.db is read-only") as caught:
        add_build(there, 2)
    assert len(str(caught.value).splitlines()) == 2


def test_another_programs_database_is_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as c:
        c.execute("CREATE TABLE bookmark (url TEXT)")
    c.close()
    for read_only in (True, False):
        with pytest.raises(DatabaseError, match="tuning database"):
            Store.open(path, read_only=read_only)


def test_urls(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(f"sqlite:///{path}") as s:
        assert s.where == str(path)
    monkeypatch.setenv("KERNGEN_DB", str(path.with_name("other.db")))
    with Store.open() as s:
        assert s.where.endswith("other.db")
    with pytest.raises(UsageError, match=r"SQLite.*PostgreSQL"):
        Store.open("mysql://host/name")
    with pytest.raises(UsageError):
        Store.open("::://")


# ---- schema


@pytest.mark.parametrize(("query", "timeouts"), [
    ({}, {"connect_timeout": "10", "keepalives_idle": "30", "tcp_user_timeout": "60000"}),
    ({"connect_timeout": "3", "keepalives_idle": "7"}, {"connect_timeout": "3", "keepalives_idle": "7"}),
])  # fmt: skip
def test_a_server_has_a_time_to_answer_in(postgresql_url: str, query: dict[str, str], timeouts: dict[str, str]) -> None:
    engine = engines.open_server(make_url(postgresql_url).update_query_dict(query).render_as_string(False))
    with engine.connect() as c:
        told = cast(Any, c.connection.driver_connection).info.get_parameters()
    engine.dispose()
    assert timeouts.items() <= told.items()


def test_a_session_does_not_wait_for_ever(postgresql_url: str) -> None:
    def shown(url: str, *names: str) -> list[str]:
        engine = engines.open_server(url)
        with engine.connect() as c:
            c.rollback()  # as a pool does with each connection that comes back
            found = [c.execute(text(f"SHOW {name}")).scalar_one() for name in names]
        engine.dispose()
        return found

    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "search_path")
    (schema_name,) = shown(postgresql_url, "search_path")
    assert shown(postgresql_url, *names) == ["5min", "1min", "5min", schema_name]
    told = make_url(postgresql_url).update_query_dict({"options": "-cstatement_timeout=7s"})
    assert shown(told.render_as_string(False), *names[:3]) == ["7s", "1min", "5min"]


def test_what_a_server_gives_up_is_one_clear_line(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines._SESSION, "lock_timeout", "50ms")
    monkeypatch.setitem(engines._SESSION, "statement_timeout", "100ms")
    engine = engines.open_server(postgresql_url)
    with (
        engines.writing(engine),
        pytest.raises(DatabaseError, match=r"locked by another process.* 60 s"),
        engines.clear_errors("there"),
        engines.writing(engine),
    ):
        pass
    with pytest.raises(DatabaseError, match=r"300 s.*statement"):  # noqa: SIM117
        with engines.clear_errors("there"), engine.connect() as c:
            c.execute(text("SELECT pg_sleep(5)"))
    engine.dispose()


def test_what_was_measured_in_a_step_is_read_back(any_store: Store) -> None:
    step = StepKey("gemma", "sm90", "verify", 8, 5, 512, 0, 12, "sequence", 0.25, {"note": "shortened"})
    build, other = add_build(any_store, 1), add_build(any_store, 2)
    id = any_store.add_step(step)
    assert any_store.add_step(step) == id
    assert any_store.steps() == {id: step}
    alone = measured(build, 1, 10.0, at="2026-01-01")
    there = replace(alone, stage="step", step_id=id, step_us=4900.0, base_step_us=5000.0, base_id="base")
    rest = replace(there, build_id=other, config={"block_n": 2}, p50_us=9.0, step_us=5000.0)
    ids = any_store.add_measurements([alone, there, rest])
    assert len(set(ids)) == 3
    assert any_store.add_measurements([there]) == [ids[1]]
    read = {o.id: o.measurement for o in any_store.measurements()}
    assert read[ids[1]] == there
    assert read[ids[0]] == alone
    (winner,) = any_store.recompute_winners("toy", key_of().static_key, Target.of(H200))
    assert (winner.config, winner.latency_us) == ({"block_n": 1}, 10.0), "slower alone, and faster in the step"
    with pytest.raises(DatabaseError, match="stage step needs step_id"):
        replace(there, base_id=None)


def test_an_altered_step_is_skipped(store: Store, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    id = store.add_step(StepKey("gemma", "sm90", "decode", 1, 1, 512, 0, 12, "sequence"))
    store.close()
    damage(path, "UPDATE step SET props = '{\"weight\":9.0}'")
    with Store.open(path) as again:
        assert again.steps() == {}
    assert id in caplog.text


def test_what_is_carried_is_kept_without_a_time(any_store: Store) -> None:
    """It is the same fact however often, and whoever, says it; and no table takes a time for it."""
    row = Measurement(key_of(), "sm90", H200, {"block_n": 3}, add_build(any_store, 3), "ok", "carried", "steps")
    assert any_store.add_measurement(row) == any_store.add_measurement(replace(row, run="r", at="2026-01-01"))
    (seen,) = any_store.measurements(provenance="carried")
    assert (seen.measurement.p50_us, seen.measurement.reason) == (None, "steps")
    (winner,) = any_store.recompute_winners("toy", key_of().static_key, Target.of(H200))
    assert (winner.provenance, winner.latency_us) == ("carried", None)
    assert any_store.line("toy", key_of().static_key, "sm90").points[0].winner.latency_us is None
    for change in ("UPDATE measurement SET p50_us = 1", "UPDATE measurement SET reason = ''",
                   "UPDATE winner SET latency_us = 1"):  # fmt: skip
        with pytest.raises(IntegrityError), any_store.engine.begin() as c:
            c.exec_driver_sql(change)


def test_the_migrations_make_the_schema(any_store: Store) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with any_store.engine.connect() as c:
        context = MigrationContext.configure(c, opts={"version_table": schema.VERSION_TABLE, "compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
        checks = {
            t.name: {k["name"] for k in inspect(c).get_check_constraints(t.name)} for t in schema.metadata.sorted_tables
        }
    for table in schema.metadata.sorted_tables:
        assert checks[table.name] == {k.name for k in table.constraints if isinstance(k, CheckConstraint)}
    assert migrate.known_revisions()[-1] == schema.SCHEMA


def test_a_migration_that_fails_leaves_nothing(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "migrations"
    shutil.copytree(migrate.MIGRATIONS, broken)
    (broken / "versions" / "9999_bad.py").write_text(
        f"from alembic import op\nrevision, down_revision = '9999', '{schema.SCHEMA}'\n"
        "def upgrade():\n    op.execute('CREATE TABLE half (x)')\n    op.execute('nonsense')\n"
    )
    with monkeypatch.context() as m:
        m.setattr(migrate, "MIGRATIONS", broken)
        m.setattr(schema, "SCHEMA", "9999")
        with pytest.raises(DatabaseError, match="nonsense"):
            Store.open(path)
    with sqlite3.connect(path) as c:
        assert c.execute("SELECT name FROM sqlite_master").fetchall() == []
    c.close()
    with Store.open(path) as s:
        assert s.winners() == []


def test_an_older_schema_is_brought_up_and_keeps_its_rows(
    store: Store, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = add_build(store)
    store.close()
    next_one = tmp_path / "migrations"
    shutil.copytree(migrate.MIGRATIONS, next_one)
    (next_one / "versions" / "9999_more.py").write_text(
        f"from alembic import op\nrevision, down_revision = '9999', '{schema.SCHEMA}'\n"
        "def upgrade():\n    op.execute('CREATE TABLE more (x)')\n"
    )
    monkeypatch.setattr(migrate, "MIGRATIONS", next_one)
    monkeypatch.setattr(schema, "SCHEMA", "9999")
    with Store.open(path) as s, s.engine.connect() as c:
        assert s.build(build)
        assert migrate.revision(c) == "9999"


# ---- ids

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), _JSON, max_size=4))
def test_ids_do_not_depend_on_order(value: dict[str, Any]) -> None:
    assert canonical(dict(reversed(value.items()))) == canonical(value)


def test_ids_are_stable() -> None:
    """A change here orphans every database in the field."""
    assert digest({"b": [1, 0.5, None], "a": {"x": "é"}}) == hashlib.sha256(
        b'{"a":{"x":"\\u00e9"},"b":[1,"0x1.0000000000000p-1",null]}'
    ).hexdigest()  # fmt: skip
    assert key_of().id == "3fcb569306906c08c99ccb1be3dd58377d662e2d387d27a37dc2f588e9681abe"
    defaults = ProblemKey("rmsnorm", {"hidden": 5376, "dtype": "bf16"}, {}, 16)
    assert defaults.id == "f7680043f06414a5c65f9afed2a2fbfacfd487e21bc4801bbec516f4bdca311a"
