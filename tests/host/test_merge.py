"""Databases are merged as sets are: in any order, any number of times, with the same rows in the end."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select
from test_tuning_db import H100, H200, STATIC, add_build, key_of, make_cubin, measured, predicted, source_of

from kerngen.arch import Target, find_arch
from kerngen.errors import DatabaseError
from kerngen.tuning_db import Store
from kerngen.tuning_db.store import schema as t
from kerngen.tuning_db.store.merge import merge

AT = "2026-11-22T10:00:0{}+00:00"
KEY = key_of().static_key


def _failed(store: Store, n: int) -> None:
    store.add_build(None, "toy", source_of(n), {"block_n": n}, STATIC, arch=find_arch("sm90"), nvrtc=(12, 9),
                    status="compile_failed", log="out of memory")  # fmt: skip


def _measure(n: int, us: float | None, run: int, **values: Any) -> Callable[[Store], None]:
    def put(store: Store) -> None:
        store.add_measurement(measured(add_build(store, n), n, us, at=AT.format(run), run=str(run), **values))

    return put


def _predict(n: int, us: float, tag: str, **values: Any) -> Callable[[Store], None]:
    """The same fact whoever asks, under words that differ."""

    def put(store: Store) -> None:
        build = add_build(store, n, keep_image=False)
        store.add_measurement(predicted(build, n, us, tags={"search": tag}, at=AT.format(len(tag)), **values))

    return put


# What a database may hold: any subset of these, in this order.
FACTS: tuple[Callable[[Store], None], ...] = (
    lambda store: _failed(store, 0), _measure(0, 10.0, 1), _measure(1, 9.0, 1), _measure(1, 11.5, 2),
    _measure(2, 8.0, 1, stage="final"),
    _measure(2, None, 3, outcome="wrong_result", reason="off by 2", problem=key_of(128)),
    _measure(3, 8.01, 3, stage="final"), _measure(3, 5.0, 2, device=H100),
    _measure(4, None, 2, outcome="launch_failed", reason="too many registers"),
    _predict(2, 7.0, "one", problem=key_of(256)), _predict(2, 7.0, "another", problem=key_of(256)),
    _predict(5, 6.0, "one", problem=key_of(256), model="roofline-2"),
    lambda store: store.revoke(add_build(store, 3), "it was wrong"),
    lambda store: store.close_search("a search", key_of(), {"trials": 4}),
    lambda store: store.close_search("a search", key_of(), {"trials": 5}),
    lambda store: store.note_rendered([add_build(store, 1)], "today"), lambda store: store.keep_image(make_cubin(9)),
)  # fmt: skip


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("empty") / "empty.db"
    Store.open(path).close()
    return path


class Made:
    """Databases of one example, in a folder that is gone with it."""

    def __init__(self, empty: Path, folder: Path, stack: ExitStack) -> None:
        self._empty, self._folder, self._stack, self._count = empty, folder, stack, 0

    def __call__(self, facts: Sequence[int] = ()) -> Store:
        self._count += 1
        path = self._folder / f"{self._count}.db"
        shutil.copy(self._empty, path)
        store = self._stack.enter_context(Store.open(path))
        with store.transaction():
            for n in sorted(facts):
                FACTS[n](store)
            derive(store)
        return store

    def union(self, *others: Store) -> Store:
        into = self()
        merge(into, others)
        return into


@pytest.fixture
def made(empty: Path) -> Iterator[Made]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Made(empty, Path(folder), stack)


def derive(store: Store) -> None:
    for device in (H200, H100):
        store.recompute_winners("toy", KEY, Target.of(device))


def rows(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    """All that a database holds. What a revocation says of when differs, as the tests make them."""
    with store.reading() as connection:
        return {
            table.name: sorted(
                tuple(row._mapping[c.name] for c in table.columns) for row in connection.execute(select(table))
            )
            for table in t.metadata.sorted_tables
        }


subsets = st.sets(st.integers(0, len(FACTS) - 1))


@given(a=subsets, b=subsets, c=subsets)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_any_number_of_times(empty: Path, a: set[int], b: set[int], c: set[int]) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        made = Made(empty, Path(folder), stack)
        x, y, z = made(sorted(a)), made(sorted(b)), made(sorted(c))
        at_once = rows(made.union(x, y, z))
        assert rows(made.union(z, y, x)) == at_once
        assert rows(made.union(x, made.union(y, z), x)) == at_once
        assert rows(made.union(made.union(z, x), y)) == at_once
        merge(x, [y])
        before = rows(x)
        again = merge(x, [y, x])
        assert rows(x) == before
        assert not again.added
        assert not again.mended
        derive(x)
        assert rows(x)["winner"] == before["winner"], "what was chosen is what would be chosen"


def test_winners_rest_on_the_union(made: Made) -> None:
    """A wrong result that one host saw ends what another one chose."""
    mine, theirs = made([1, 4]), made([2, 5])
    assert [w.config for w in mine.winners(device="H200")] == [{"block_n": 2}]
    done = merge(mine, [theirs])
    assert done.added == {"build": 1, "artifact": 1, "problem": 1, "measurement": 2}
    assert done.winners == 1
    assert [w.config for w in mine.winners(device="H200")] == [{"block_n": 1}]
    assert (done.damaged, done.conflicts) == ([], [])


def test_a_revocation_that_comes_alone_counts(made: Made) -> None:
    mine, theirs = made([2, 7]), made()
    for build in mine.builds(KEY).values():
        if build.config == {"block_n": 1}:
            theirs.revoke(build.id, "it was wrong")
    assert merge(mine, [theirs]).winners == 1
    assert [w.device for w in mine.winners()] == [H100]


def test_a_dry_run_says_the_same_and_does_nothing(made: Made) -> None:
    mine, theirs = made([1]), made([2, 4, 12])
    before = rows(mine)
    said = merge(mine, [theirs], dry_run=True)
    assert rows(mine) == before
    assert merge(mine, [theirs]) == said
    assert said.added["measurement"] == 2


def alter(store: Store, sql: str, *values: Any) -> None:
    with closing(sqlite3.connect(store.where, isolation_level=None)) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        assert connection.execute(sql, values).rowcount > 0


@pytest.mark.parametrize(("sql", "named", "lost"), [
    ("UPDATE measurement SET p50_us = 0.01 WHERE p50_us = 9.0", "measurement", 1),
    ("UPDATE measurement SET reason = 'x' WHERE p50_us = 9.0", "measurement", 1),
    ("UPDATE build SET registers = 1 WHERE config LIKE '%1%'", "build", 3),
    ("UPDATE build SET image_sha = 'x' WHERE config LIKE '%1%'", "build", 3),
    ("UPDATE problem SET dynamic = 65 WHERE dynamic = 64", "problem", 3),
    ("UPDATE device SET name = 'H200', num_sms = 1", "device", 3),
    ("UPDATE environment SET props = '{'", "environment", 3),
    ("UPDATE artifact SET blob = x'00'", "artifact", 0),
    ("UPDATE search SET summary = '{}'", "search", 0),
    ("UPDATE rendered SET closure = 'tomorrow'", "rendered", 0),
    ("UPDATE measurement SET run = CAST(x'ff' AS TEXT) WHERE p50_us = 9.0", "measurement", 1),
])  # fmt: skip
def test_a_damaged_row_is_named_and_left(made: Made, sql: str, named: str, lost: int) -> None:
    """What rests on it is left too: the database stays one that can be relied on."""
    theirs = made([2, 3, 4, 13, 15])
    sound = made.union(theirs)
    alter(theirs, sql)
    mine = made()
    done = merge(mine, [theirs])
    assert any(f"{theirs.where}: {named} " in line for line in done.damaged), done.damaged
    assert len(mine.measurements()) >= len(sound.measurements()) - lost
    with closing(sqlite3.connect(mine.where)) as connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    clean = rows(sound)
    for table, there in rows(mine).items():
        assert table in ("winner", "line") or set(there) <= set(clean[table])
    assert merge(mine, [sound]).damaged == []
    assert rows(mine) == clean, "what came sound later is there, and the winners are those of all"


def test_a_sound_row_puts_a_damaged_one_right(made: Made) -> None:
    mine, theirs = made([2, 4]), made([2, 4])
    clean = rows(theirs)
    alter(mine, "UPDATE measurement SET p50_us = 0.5 WHERE p50_us = 9.0")
    done = merge(mine, [theirs])
    assert done.mended == {"measurement": 1}
    assert rows(mine) == clean


def test_an_altered_revocation_counts_all_the_same(made: Made) -> None:
    mine, theirs = made([6]), made([6, 12])
    alter(theirs, "UPDATE revocation SET reason = 'never mind'")
    done = merge(mine, [theirs])
    assert len(done.damaged) == 1
    assert set(mine.revoked().values()) == {"never mind"}
    assert mine.winners() == []


def test_two_compilers_results_of_one_build_are_said(made: Made) -> None:
    """Builds are known by NVRTC's major and minor version: a patch release may give other machine code."""
    mine, theirs = made([1]), made([1])
    with theirs.writing() as connection:
        connection.execute(t.winner.delete())
        connection.execute(t.measurement.delete())
        connection.execute(t.build.delete())
    add_build(theirs, 0, spills=8)
    want = rows(made.union(mine, theirs))
    assert rows(made.union(theirs, mine)) == want
    done = merge(mine, [theirs])
    (said,) = done.conflicts
    assert "differs in entries, spill_bytes" in said
    assert "stays" in said


def test_nothing_is_merged_into_what_is_only_read(made: Made) -> None:
    theirs = made([1])
    with Store.open(theirs.where, read_only=True) as mine, pytest.raises(DatabaseError, match="opened read-only"):
        merge(mine, [theirs])


def test_a_server_and_a_file_merge_alike(made: Made, postgresql_url: str) -> None:
    x, y = made([1, 3, 4, 10, 12, 16]), made([2, 5, 6, 9, 11, 13])
    want = rows(made.union(x, y))
    with Store.open(postgresql_url) as server:
        merge(server, [y, x])
        assert {n: [tuple(map(_plain, r)) for r in rs] for n, rs in rows(server).items()} == {
            n: [tuple(map(_plain, r)) for r in rs] for n, rs in want.items()
        }
        assert rows(made.union(server)) == want


def _plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview) else value
