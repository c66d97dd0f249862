"""A sealed file: each byte that is not as it was sealed is found, and no row that was not sealed is served."""

from __future__ import annotations

import json
import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerngen.errors import CorruptRecord, DatabaseError, KerngenError
from kerngen.tuning_db.dist.keys import SecretKey
from kerngen.tuning_db.dist.seal import damage, rows_of, seal, sign
from kerngen.tuning_db.read import trust
from kerngen.tuning_db.read.sealed import FOOTER_BYTES, QUERY_ERRORS, Sealed, Value, leaf, tail_of
from kerngen.tuning_db.read.trust import signed_message

pytestmark = pytest.mark.usefixtures("nobody_is_trusted")

ABOUT = {"schema": "0003", "name": "test", "contents": {"arches": ["sm90"]}}
PAGE = 4096
ANN, BOB = SecretKey(b"a" * 32, "ann"), SecretKey(b"b" * 32, "bob")


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A database with tables that a run reads and one that it does not, of some pages, in write-ahead mode."""
    path = tmp_path / "tuning.db"
    rng = random.Random(7)
    with closing(sqlite3.connect(path)) as c:
        c.executescript(f"""
            PRAGMA page_size = {PAGE}; PRAGMA journal_mode = WAL;
            CREATE TABLE line (id TEXT PRIMARY KEY, kernel TEXT, body TEXT, latency REAL, points INTEGER);
            CREATE TABLE artifact (sha TEXT PRIMARY KEY, blob BLOB) WITHOUT ROWID;
            CREATE TABLE revocation (id TEXT, reason TEXT);
            CREATE TABLE measurement (id INTEGER PRIMARY KEY, us REAL, reason TEXT);
            CREATE INDEX line_by_kernel ON line (kernel);""")
        lines = [
            (f"id{n}", f"kernel{n % 3}", rng.randbytes(150).hex(), n / 7, None if n % 5 == 0 else n) for n in range(40)
        ]
        c.executemany("INSERT INTO line VALUES (?, ?, ?, ?, ?)", lines)
        c.executemany("INSERT INTO artifact VALUES (?, ?)", [(f"sha{n}", rng.randbytes(300)) for n in range(20)])
        c.executemany("INSERT INTO measurement VALUES (?, ?, ?)", [(n, n * 1.5, "reason " * 9) for n in range(60)])
        c.execute("INSERT INTO revocation VALUES ('id3', 'it lies')")
        c.commit()
    return path


@pytest.fixture
def bundle(db: Path, tmp_path: Path) -> Path:
    """That database, sealed and signed by Ann; writable, to be tampered with."""
    path = tmp_path / "sealed.kgdb"
    seal(db, path, ABOUT, keys=[ANN])
    path.chmod(0o644)
    return path


def rows(path: Path, table: str) -> list[tuple[Value, ...]]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as c:
        return list(rows_of(c, table))


def served(sealed: Sealed, table: str = "line") -> list[tuple[Value, ...]]:
    """What a run that trusts leaves alone would take from `table`; damage that SQLite notices costs the rest."""
    found = []
    try:
        with closing(sealed.connect()) as c:
            for row in rows_of(c, table):
                if sealed.has(table, row):
                    found.append(row)
    except QUERY_ERRORS:
        pass
    return found


# ---- what is sealed comes back


def test_the_rows_come_back_and_the_file_says_what_it_is(db: Path, bundle: Path) -> None:
    sealed = Sealed.open(bundle)
    assert ABOUT.items() <= sealed.header.items()
    assert sealed.header["stored"] == ["line", "artifact", "revocation"]
    assert {t: v["rows"] for t, v in sealed.header["tables"].items()} == {
        "line": 40, "artifact": 20, "revocation": 1, "measurement": 60,
    }  # fmt: skip
    for table in sealed.header["tables"]:
        assert sorted(rows(db, table)) == sorted(rows(bundle, table)), "any SQLite reads it"
        assert sealed.rows(table) == len(rows(db, table))
        assert all(sealed.has(table, row) == (table != "measurement") for row in rows(db, table))
    assert sorted(served(sealed)) == sorted(rows(db, "line"))
    assert (sealed.is_whole(), damage(bundle)) == (True, [])
    assert not sealed.has("line", (*rows(db, "line")[0][:-1], 99))
    assert not sealed.has("artifact", rows(db, "revocation")[0])
    assert not sealed.has("nothing", ())


def test_it_is_read_only_and_reading_leaves_nothing(db: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "b.kgdb"
    seal(db, out, ABOUT)
    assert out.stat().st_mode & 0o777 == 0o444
    sealed = Sealed.open(out)
    before = out.read_bytes()
    with closing(sealed.connect()) as c:
        assert c.execute("SELECT count(*) FROM line").fetchone() == (40,)
        with pytest.raises(sqlite3.OperationalError):
            c.execute("DELETE FROM line")
    damage(out)
    assert out.read_bytes() == before
    assert [p.name for p in out.parent.iterdir()] == ["b.kgdb"]


def test_the_same_rows_give_the_same_bytes(db: Path, tmp_path: Path) -> None:
    digests = {seal(db, tmp_path / name, ABOUT, keys=keys) for name, keys in (("a", [ANN, BOB]), ("b", [BOB, ANN]))}
    assert len(digests) == 1
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert seal(tmp_path / "a", tmp_path / "c", ABOUT, keys=[ANN, BOB]) in digests, "a sealed file is a database"
    with closing(sqlite3.connect(db)) as c:
        c.execute("UPDATE measurement SET us = 2 WHERE id = 1")
        c.commit()
    assert seal(db, tmp_path / "d", ABOUT) not in digests
    assert seal(db, tmp_path / "e", {**ABOUT, "name": "x"}) not in digests


def test_signing_changes_the_tail_alone(bundle: Path) -> None:
    before = Sealed.open(bundle)
    size = before.header["image"]["bytes"]
    head = bundle.read_bytes()[:size]
    assert list(before.signatures) == [ANN.public.id]
    sign(bundle, BOB)
    sign(bundle, BOB)
    after = Sealed.open(bundle)
    assert sorted(after.signatures) == sorted([ANN.public.id, BOB.public.id])
    assert (after.digest, after.header, after.leaves) == (before.digest, before.header, before.leaves)
    assert bundle.read_bytes()[:size] == head
    assert all(k.public.verifies(after.signatures[k.public.id], signed_message(after.digest)) for k in (ANN, BOB))
    assert damage(bundle) == []


def test_what_was_changed_is_not_signed(bundle: Path) -> None:
    with bundle.open("r+b") as f:
        f.seek(PAGE * 3)
        f.write(b"changed")
    before = bundle.read_bytes()
    with pytest.raises(CorruptRecord, match=r"changed since.*sealed"):
        sign(bundle, BOB)
    assert bundle.read_bytes() == before


# ---- what is not


def damage_or_refusal(path: Path) -> list[str]:
    try:
        return damage(path)
    except DatabaseError as e:
        return [e.message]


def flip(fd: int, at: int, by: int) -> None:
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ by]), at)


def test_every_flipped_byte_is_found_and_no_other_row_is_served(bundle: Path, db: Path) -> None:
    """Each byte of the first and of the last page and of the tail, and 10^4 others; a bit or all of them."""
    sealed = Sealed.open(bundle)
    good = set(rows(db, "line"))
    size, total = sealed.header["image"]["bytes"], bundle.stat().st_size
    rng = random.Random(11)
    ends = [*range(PAGE), *range(size - PAGE, total)]
    others = [rng.randrange(PAGE, size - PAGE) for _ in range(10_000)]
    refused = passed_over = 0
    fd = os.open(bundle, os.O_RDWR)
    for n, at in enumerate(ends + others):
        by = 0xFF if n % 2 else 1 << rng.randrange(8)
        flip(fd, at, by)
        try:
            now = Sealed.open(bundle)
        except DatabaseError:
            refused += 1
        else:
            assert at < size, f"byte {at} of the tail"
            assert not now.is_whole(), f"byte {at} of the image"
            if at < PAGE or n % 5 == 0:
                found = served(now)
                assert good.issuperset(found), f"byte {at} made a row that was not sealed"
                passed_over += len(good) - len(found)
        flip(fd, at, by)
    os.close(fd)
    assert refused >= total - size
    assert passed_over > 0, "no flip has reached a row"
    assert damage(bundle) == []


def test_a_file_that_is_cut_or_grown_is_refused(bundle: Path) -> None:
    data = bundle.read_bytes()
    for cut in {0, 1, 63, 64, 100, PAGE, len(data) // 2, len(data) - FOOTER_BYTES, len(data) - 1}:
        bundle.write_bytes(data[:cut])
        with pytest.raises(DatabaseError):
            Sealed.open(bundle)
    for grown in (data + b"\0", b"\0" + data, data[:PAGE] + data, data + data[-FOOTER_BYTES:]):
        bundle.write_bytes(grown)
        with pytest.raises(DatabaseError):
            Sealed.open(bundle)


@pytest.mark.parametrize(("statement", "says"), [
    ("UPDATE line SET latency = 0.01 WHERE id = 'id7'",
     "line has 40 of 40 rows: 1 that were sealed are not there, 1 were not sealed"),
    ("DELETE FROM line WHERE id = 'id7'",
     "line has 39 of 40 rows: 1 that were sealed are not there, 0 were not sealed"),
    ("UPDATE line SET kernel = 'kernel0', points = '4' WHERE id = 'id4'",
     "line has 40 of 40 rows: 1 that were sealed are not there, 1 were not sealed"),
    ("INSERT INTO revocation VALUES ('id9', '')",
     "revocation has 2 of 1 rows: 0 that were sealed are not there, 1 were not sealed"),
    ("DELETE FROM revocation", "revocation has 0 of 1 rows: 1 that were sealed are not there, 0 were not sealed"),
    ("UPDATE measurement SET us = 0.01 WHERE id = 7",
     "rows of measurement were changed: measurement has 60 of 60 rows"),
    ("ALTER TABLE line RENAME COLUMN points TO body2", None),
    ("DROP TABLE measurement", "the table measurement is gone"),
    ("CREATE TABLE more (x)", "the table more was not sealed"),
    ("CREATE VIEW v AS SELECT 1",
     "its schema cannot be read: it has the view v, and a tuning database has plain tables alone"),
    ("CREATE TRIGGER t AFTER INSERT ON line BEGIN SELECT 1; END",
     "its schema cannot be read: it has the trigger t, and a tuning database has plain tables alone"),
])  # fmt: skip
def test_what_was_done_with_the_sqlite3_shell_is_named_and_not_served(
    bundle: Path, db: Path, statement: str, says: str | None
) -> None:
    """Also where the tail is put back behind what SQLite wrote, with the lengths right."""
    before = Sealed.open(bundle)
    good = set(rows(db, "line"))
    size = before.header["image"]["bytes"]
    with closing(sqlite3.connect(bundle)) as c:
        c.execute(statement)
        c.commit()
    assert damage_or_refusal(bundle), "what SQLite itself leaves of the file"
    image = bundle.read_bytes()
    image = image[: int.from_bytes(image[28:32], "big") * PAGE]
    forged = {**before.header, "image": {**before.header["image"], "bytes": len(image)}}
    bundle.write_bytes(bytes(image) + tail_of(len(image), forged, before.leaves, before.signatures))
    found = damage(bundle)
    assert found[0] == f"{bundle} was changed since it was sealed"
    if says is not None:
        assert says in found
    sealed = Sealed.open(bundle)
    assert good.issuperset(served(sealed))
    assert len(good) - len(served(sealed)) <= 1, "one damaged row costs that row"
    if len(image) != size:
        trust.trust(ANN.public)
        assert "does not hold" in str(sealed.why_untrusted()), "the header was changed for it"


def test_a_row_of_another_table_was_not_sealed(bundle: Path) -> None:
    sealed = Sealed.open(bundle)
    row = rows(bundle, "revocation")[0]
    assert sealed.has("revocation", row)
    assert not sealed.has("line", row)


@given(st.data())
def test_other_rows_have_other_leaves(data: st.DataObject) -> None:
    value = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
    a, b = (data.draw(st.tuples(st.sampled_from(["t", "tt"]), st.lists(value, max_size=3))) for _ in range(2))

    def exact(row: tuple[str, list[Any]]) -> Any:
        return row[0], [(type(v), v.hex() if isinstance(v, float) else v) for v in row[1]]

    assert (leaf(*a) == leaf(*b)) == (exact(a) == exact(b))


def test_values_that_look_alike_have_other_leaves() -> None:
    alike: list[list[Value]] = [
        [1], [1.0], ["1"], [b"1"], [None], [""], [b""], [], ["", ""], ["ab", "c"], ["a", "bc"], [0.0], [-0.0],
    ]  # fmt: skip
    assert len({leaf("t", row) for row in alike}) == len(alike)


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Sealed], bytes]:
    def forge(sealed: Sealed) -> bytes:
        header = json.loads(json.dumps(sealed.header))
        change(header)
        return tail_of(sealed.header["image"]["bytes"], header, sealed.leaves, {})

    return forge


@pytest.mark.parametrize("forge", [
    _header(lambda h: h.update(kerngen_bundle=2)), _header(lambda h: h.pop("kerngen_bundle")),
    _header(lambda h: h.update(image=None)), _header(lambda h: h["image"].update(bytes=7)),
    _header(lambda h: h["image"].update(sha256="x")), _header(lambda h: h.update(tables=[])),
    _header(lambda h: h["tables"]["line"].update(rows=39)),
    _header(lambda h: h["tables"]["line"].update(rows=40.0)),
    _header(lambda h: h["tables"]["line"].update(rows=-40)),
    _header(lambda h: h["tables"]["measurement"].update(digest=3)),
    _header(lambda h: h["tables"]["line"].update(digest="0" * 64)), _header(lambda h: h.update(stored=["line"])),
    _header(lambda h: h.update(stored=["revocation", "line", "artifact"])),
    _header(lambda h: h.update(stored=["line", "line", "artifact", "revocation"])),
    _header(lambda h: h.update(stored=["nothing"])),
    lambda s: tail_of(s.header["image"]["bytes"], s.header, s.leaves[32:] + s.leaves[:32], {}),
    lambda s: tail_of(s.header["image"]["bytes"], s.header, s.leaves + bytes(32), {}),
    lambda s: tail_of(s.header["image"]["bytes"], s.header, s.leaves, {"../x": b""}),
    lambda s: tail_of(s.header["image"]["bytes"] - PAGE, s.header, s.leaves, {}),
])  # fmt: skip
def test_a_tail_that_is_whole_and_lies_is_refused(bundle: Path, forge: Callable[[Sealed], bytes]) -> None:
    sealed = Sealed.open(bundle)
    size = sealed.header["image"]["bytes"]
    bundle.write_bytes(bundle.read_bytes()[:size] + forge(sealed))
    with pytest.raises(DatabaseError):
        Sealed.open(bundle)


@pytest.mark.parametrize(
    ("place", "says"),
    [("nothing", "No such file"), ("folder", "no regular file"), ("pipe", "no regular file"), ("text", "no sealed"),
     ("tuning.db", "no sealed database, or was cut short")],
)  # fmt: skip
def test_what_is_no_sealed_file_is_one_clear_line(db: Path, tmp_path: Path, place: str, says: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("hello")
    for refuse in (Sealed.open, damage):
        with pytest.raises(DatabaseError, match=says):
            refuse(tmp_path / place)


def test_what_cannot_be_sealed_is_refused_and_leaves_nothing(db: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "b.kgdb"
    (tmp_path / "text").write_text("hello " * 999)
    os.mkfifo(tmp_path / "pipe")
    for source in ("text", "nothing", "pipe"):
        with pytest.raises((KerngenError, OSError)):
            seal(tmp_path / source, out, ABOUT)
    with closing(sqlite3.connect(db)) as c:
        c.execute("CREATE VIEW v AS SELECT 1")
    with pytest.raises(DatabaseError, match="it has the view v"):
        seal(db, out, ABOUT)
    with pytest.raises(ValueError, match="says image by itself"):
        seal(db, out, {"image": 1})
    assert not out.exists()
