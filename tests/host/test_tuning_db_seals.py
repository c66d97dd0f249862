"""Rows that were changed by hand: each is named in a warning and not believed, and the next in order is asked."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Double, Table
from test_tuning_db import H200, add_build, damage, key_of, measured, predicted
from test_tuning_db_lookup import Problem, ask, fake_render, make_kernel, record

from kerngen.arch import Device
from kerngen.tuning_db import Store
from kerngen.tuning_db.read.ids import seal_of
from kerngen.tuning_db.store import schema as t

KERNEL = make_kernel()


@pytest.fixture(autouse=True)
def _renders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kerngen.compiler.render.source_of", fake_render)
    monkeypatch.setattr(
        "kerngen.compiler.source_digest.source_digest_of", lambda kernel: f"closure of version {kernel.spec.version}"
    )


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    """Of one problem two trials, the better of them the winner, and another tuned point."""
    with Store.open(path) as s:
        for n, us in ((1, 20.0), (2, 10.0)):
            record(s, KERNEL, n, us)
        record(s, KERNEL, 3, 30.0, problem=Problem(num_tokens=128))
        yield s


def changed(table: Table, column: str) -> str:
    """A statement that gives the 10 us winner of `store` another value in `column`, one that the schema allows."""
    c = table.c[column]
    if c.foreign_keys:
        (foreign,) = c.foreign_keys
        other = foreign.column.table.name
        value = f"(SELECT id FROM {other} WHERE id <> {column} LIMIT 1)"
    elif column == "provenance":
        value = "'predicted'"
    elif isinstance(c.type, Double):
        value = f"coalesce({column}, 0) / 2 + 0.01"
    else:
        value = f"{column} || ' '"
    return f"UPDATE winner SET {column} = {value} WHERE latency_us = 10.0"


@pytest.mark.parametrize("column", [c.name for c in t.winner.columns])
def test_a_winner_with_any_other_value_is_not_served(
    store: Store, path: Path, tmp_path: Path, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    if column == "device_id":
        record(store, KERNEL, 1, 40.0, device=make_other_device())
    with Store.open(tmp_path / "next.db", name="next") as following:
        record(following, KERNEL, 7, 50.0)
        served = ask([store, following], KERNEL)
        assert served.latency_us == 10.0
        damage(path, changed(t.winner, column))
        now = ask([store, following], KERNEL)
    assert (now.source, now.latency_us, now.config) == ("next: exact device", 50.0, {"block_n": 7})
    others = store.winners()  # whatever it is filed under now
    assert "it does not match its own seal" in caplog.text
    assert (served.id in caplog.text) or column == "id"
    assert 30.0 in [w.latency_us for w in others]
    assert 10.0 not in [w.latency_us for w in others]


def make_other_device() -> Device:
    return replace(H200, name="H200 of another make")


def test_the_problem_that_was_asked_for_is_sealed_with_its_winner(
    store: Store, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(path, "UPDATE measurement SET fields = replace(fields, '64', '63') WHERE p50_us = 10.0")
    assert ask([store], KERNEL) is None
    assert "does not match its own seal" in caplog.text


def test_winners_that_are_chosen_anew_are_sealed_anew(store: Store, path: Path) -> None:
    damage(path, changed(t.winner, "latency_us"))
    assert ask([store], KERNEL) is None
    record(store, KERNEL, 1, 21.0)
    found = ask([store], KERNEL)
    assert found.latency_us == 10.0


# ---- searches


@pytest.mark.parametrize(
    "change",
    [
        """summary = '{"tried":8}'""",
        "summary = '{'",
        "summary = '[[]]'",
        "summary = CAST(x'ff' AS TEXT)",
        "summary = x'00'",
        "problem_id = (SELECT id FROM problem WHERE dynamic = 128)",
        "seal = ''",
    ],
)
def test_an_altered_search_was_never_finished(
    store: Store, path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.close_search("a", key_of(), {"tried": 7})
    store.close_search("a", key_of(256), {"tried": 9})
    (id,) = rows(path, f"SELECT id FROM search WHERE problem_id = '{key_of().id}'")[0]
    damage(path, f"UPDATE search SET {change} WHERE id = '{id}'")
    assert store.closed_searches("a") == {key_of(256).id: {"tried": 9}}
    assert f"search {id} cannot be read" in caplog.text
    store.close_search("a", key_of(), {"tried": 7})
    assert store.closed_searches("a") == {key_of().id: {"tried": 7}, key_of(256).id: {"tried": 9}}


# ---- revocations


def test_an_altered_revocation_counts_all_the_same(store: Store, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it names may be wrong to serve; that it is not served costs the next candidate's time at most."""
    found = ask([store], KERNEL)
    store.revoke(found.build_id, "hangs")
    assert ask([store], KERNEL) is None
    assert "its own seal" not in caplog.text
    (id,) = rows(path, "SELECT id FROM revocation")[0]
    for change in ("reason = 'never mind'", "at = ''", "reason = x'00'", "seal = x'00'"):
        damage(path, f"UPDATE revocation SET {change}")
        assert ask([store], KERNEL) is None
    assert caplog.text.count(f"revocation {id} does not match its own seal") == 1
    store.revoke(found.build_id, "hangs")
    assert store.revoked() == {found.build_id: "hangs"}


@pytest.mark.parametrize("value", ["CAST(x'ff' AS TEXT)", "x'00'", "7"])
def test_a_revocation_of_what_is_no_name_does_not_raise(store: Store, path: Path, value: str) -> None:
    found = ask([store], KERNEL)
    assert found is not None
    store.revoke("0" * 64, "hangs")
    damage(path, f"UPDATE revocation SET subject_id = {value}")
    assert ask([store], KERNEL) == found
    store.revoke(found.build_id, "hangs")
    assert ask([store], KERNEL) is None


# ---- former names


def test_an_altered_former_name_leads_nowhere(store: Store, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = ask([store], KERNEL)
    row = {"was": "0" * 64, "id": found.build_id}
    with closing(sqlite3.connect(path)) as c, c:
        c.execute("INSERT INTO former VALUES (?, ?, ?)", (*row.values(), seal_of("former", row)))
    store.revoke(row["was"], "hangs")
    assert ask([store], KERNEL) is None
    for other in ("(SELECT id FROM build WHERE id <> former.id LIMIT 1)", "x'00'"):
        damage(path, f"UPDATE former SET id = {other}")
        assert store.renamed([row["was"]]) == set()
        assert store.revoked() == {row["was"]: "hangs"}
        assert ask([store], KERNEL) == found
    assert caplog.text.count(f"what {row['was']} is called now does not match its own seal") == 1


# ---- measurements: what their ids leave out


@pytest.mark.parametrize("column", ["reason", "tags", "run", "at", "seal"])
@pytest.mark.parametrize("provenance", ["measured", "predicted"])
def test_the_words_about_a_trial_are_sealed(
    path: Path, column: str, provenance: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Store.open(path) as store:
        trial = {"measured": measured, "predicted": predicted}[provenance](add_build(store), 0, 12.0, at="2026-01-01")
        id = store.add_measurement(trial)
        damage(path, f"UPDATE measurement SET {column} = {column} || ' '")
        assert store.measurements() == []
        assert f"measurement {id} does not match its own digest" in caplog.text
        assert store.add_measurement(trial) == id, "the same fact once more"
        assert [o.id for o in store.measurements()] == [id]


def test_the_id_of_a_trial_leaves_out_seed_settings_and_reason(path: Path) -> None:
    with Store.open(path) as store:
        build = add_build(store)
        ids = {
            store.add_measurement(measured(build, 0, None, outcome="timed_out", at="2026-01-01", run="r", **words))
            for words in ({"reason": "1 s", "tags": {"search": "seed 0"}}, {"reason": "2 s"})
        }
        (seen,) = store.measurements()
    assert ids == {seen.id}
    assert (seen.measurement.reason, seen.measurement.tags) == ("1 s", {"search": "seed 0"}), "the first stays"


def rows(path: Path, statement: str) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as c:
        return c.execute(statement).fetchall()
