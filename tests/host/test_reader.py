"""What a run reads: lines, of its own files and of sealed ones; nothing altered, nothing that nobody answers for."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_tuning_db import H200
from test_tuning_db_lookup import KIN, Config, Problem, fake_render, make_kernel, record

from kerngen import api
from kerngen.arch import Target, find_device
from kerngen.errors import CorruptRecord, DatabaseError, TrustError
from kerngen.tuning_db import Store, Winner, WinnerTable, default_sources, lookup, open_source, problem_key
from kerngen.tuning_db.dist.keys import SecretKey
from kerngen.tuning_db.dist.seal import seal
from kerngen.tuning_db.read import reader as reading
from kerngen.tuning_db.read import trust
from kerngen.tuning_db.read.boards import at_hand
from kerngen.tuning_db.read.ids import seal_of
from kerngen.tuning_db.read.kernel_index import COLUMNS, KernelIndex, decode, encode
from kerngen.tuning_db.read.reader import Reader
from kerngen.tuning_db.store import schema

KERNEL, NEWER = make_kernel(), make_kernel(version=2)
PROBLEM = Problem()
KEY = problem_key(KERNEL, PROBLEM).static_key
ANN = SecretKey(b"a" * 32, "ann")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Played sources and closures; nobody is trusted, and nothing shipped."""
    monkeypatch.setattr("kerngen.compiler.render.source_of", fake_render)
    monkeypatch.setattr(
        "kerngen.compiler.source_digest.source_digest_of", lambda kernel: f"closure of version {kernel.spec.version}"
    )
    for name in ("KERNGEN_TRUST", "KERNGEN_TRUST_UNSIGNED", "KERNGEN_TRUST_FILES", "KERNGEN_DB_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(trust, "_HOST", tmp_path / "etc" / "trusted")
    monkeypatch.setattr("kerngen.tuning_db.read.places.PREBUILT", tmp_path / "none")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two points, two boards, two versions of the kernel, a prediction, and the code of a build that nobody chose."""
    path = tmp_path_factory.mktemp("pristine") / "tuning.db"
    with pytest.MonkeyPatch.context() as m:
        m.setattr("kerngen.compiler.render.source_of", fake_render)
        m.setattr(
            "kerngen.compiler.source_digest.source_digest_of",
            lambda kernel: f"closure of version {kernel.spec.version}",
        )
        with Store.open(path) as store:
            record(store, KERNEL, 1, 20.0)
            record(store, KERNEL, 2, 10.0)
            record(store, KERNEL, 4, 30.0, problem=Problem(num_tokens=128))
            record(store, KERNEL, 8, 5.0, device=KIN, provenance="predicted")
            record(store, NEWER, 2, 9.0)
    return path


@pytest.fixture
def path(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(pristine, tmp_path / "tuning.db"))


@pytest.fixture
def reader(path: Path) -> Iterator[Reader]:
    with opened(path) as r:
        yield r


def opened(path: Path) -> Reader:
    found = Reader.open(path, name="user")
    assert found is not None
    return found


def line_in(source: Reader | Store) -> KernelIndex:
    found = source.line("toy", KEY, "sm90")
    assert found is not None
    return found


def ask(source: Any, problem: Problem = PROBLEM, version: int = 1) -> Winner | None:
    return lookup([source], make_kernel(version), problem, Target.of(H200))


def alter(path: Path, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(path)) as c:
        assert c.execute(statement, values).rowcount > 0
        c.commit()


# ---- a line says what the rows say


def test_a_line_is_what_the_rows_say(reader: Reader, path: Path) -> None:
    with Store.open(path, read_only=True, name="user") as store:
        line = line_in(store)
        assert line_in(reader) == replace(
            line, points=[replace(p, winner=replace(p.winner, why={})) for p in line.points]
        ), "all but the figures behind the reason, which no run asks for"
        for version in (1, 2, 3):
            for tokens in (64, 65, 128):
                problem = Problem(num_tokens=tokens)
                a, b = ask(store, problem, version), ask(reader, problem, version)
                assert a is not None
                assert b is not None
                assert replace(a, why={}) == b
    assert len(line.points) == 5
    assert len(line.spare) == 1
    assert encode(decode(encode(line), "toy", KEY, "sm90")) == encode(line)


def test_each_version_of_the_kernel_is_served_its_own(reader: Reader) -> None:
    first, second, third = (ask(reader, version=v) for v in (1, 2, 3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.latency_us, first.stale, second.latency_us, second.stale) == (10.0, False, 9.0, False)
    assert (third.config, third.stale, third.cubin) == ({"block_n": 2}, True, None)


def test_its_own_comes_first_though_another_is_current_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions that render the same sources; each was tuned, one with more trials."""
    monkeypatch.setattr("kerngen.compiler.source_digest.source_digest_of", lambda kernel: "a comment was added")
    with Store.open(path) as store:
        record(store, KERNEL, 32, 1.0)
    with opened(path) as r:
        found = ask(r)
        assert (found.config, found.stale) == ({"block_n": 32}, False)
        monkeypatch.setattr(
            "kerngen.compiler.source_digest.source_digest_of",
            lambda kernel: f"closure of version {kernel.spec.version}",
        )
        found = ask(r)
        assert (found.config, found.stale) == ({"block_n": 2}, False)


def test_the_machine_code_of_a_default_is_served_too(reader: Reader) -> None:
    bound = WinnerTable([reader], KERNEL, Problem(), Target.of(H200))
    code = bound.code(Problem(), Config(1))
    assert code.image == b"code 1" * 99
    assert bound.code(Problem(), Config(3)) is None
    assert WinnerTable([reader], make_kernel(version=3), Problem(), Target.of(H200)).code(Problem(), Config(1)) is None


def test_what_is_committed_meanwhile_is_seen_and_no_lock_is_held(reader: Reader, path: Path) -> None:
    before = ask(reader)
    assert before is not None
    with Store.open(path) as store:
        record(store, KERNEL, 16, 1.0)
        after = ask(reader)
    assert (before.config, after.config) == ({"block_n": 2}, {"block_n": 16})


def test_a_migration_makes_the_lines(tmp_path: Path) -> None:
    """Of a file of schema 1; reading it as it is takes a Store, with a copy in memory."""
    path = Path(shutil.copy(Path(__file__).parent / "schema1.sqlite", tmp_path / "old.db"))
    with open_source(path) as old:
        assert isinstance(old, Store)
        before = {w.id for w in old.winners()}
    Store.open(path).close()
    with opened(path) as new:
        assert {w.id for w in new.winners()} == before != set()


def test_a_server_says_the_same(path: Path, postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same trials; its lines are made of its rows."""
    monkeypatch.setattr("kerngen.tuning_db.store.rows.now", lambda: "2026-01-01T00:00:00+00:00")
    monkeypatch.setattr("kerngen.tuning_db.store.store.now", lambda: "2026-01-01T00:00:00+00:00")
    file = path.with_name("file.db")
    for place in (str(file), postgresql_url):
        with Store.open(place) as store:
            for version, block_n, us in ((1, 1, 20.0), (1, 2, 10.0), (2, 2, 9.0)):
                record(store, make_kernel(version), block_n, us)
    with open_source(file) as here, open_source(postgresql_url) as there:
        assert isinstance(there, Store)
        assert encode(line_in(there)) == encode(line_in(here))  # type: ignore[arg-type]
        for version in (1, 2, 3):
            a, b = ask(here, version=version), ask(there, version=version)
            assert a is not None
            assert (a.id, a.config, a.cubin, a.stale) == (b.id, b.config, b.cubin, b.stale)


def test_this_schema_is_read_here() -> None:
    """A migration that changes none of the tables that a run reads adds its number to SCHEMAS."""
    assert schema.SCHEMA in reading.SCHEMAS
    assert tuple(c.name for c in schema.line.columns) == COLUMNS


# ---- damage


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("value", ["x", b"\xff", None, 7])
def test_an_altered_line_costs_itself_alone(
    path: Path, column: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(sqlite3.connect(path)) as c:
        c.executescript("CREATE TABLE loose AS SELECT * FROM line; DROP TABLE line; ALTER TABLE loose RENAME TO line")
    with opened(path) as r:
        assert ask(r) is not None
    alter(path, f"UPDATE line SET {column} = ?", value)
    with opened(path) as r, opened(path.with_name("tuning.db")) as other:
        assert ask(r) is None
        assert other.revoked() == {}
    assert "the line of" in caplog.text
    assert "looking on without it" in caplog.text


def test_a_byte_of_a_line_is_noticed(path: Path) -> None:
    """As by the sqlite3 shell: the configuration of a build, a time, the board."""
    for was, now in (('"us":10.0', '"us":1.0'), ('"block_n":2', '"block_n":4'), ('"num_sms":132', '"num_sms":133')):
        with closing(sqlite3.connect(path)) as c:
            (body,) = c.execute("SELECT body FROM line").fetchone()
        assert was in body
        alter(path, "UPDATE line SET body = ?", body.replace(was, now))
        with opened(path) as r, pytest.raises(CorruptRecord, match="its own seal"):
            r.line("toy", KEY, "sm90")
        alter(path, "UPDATE line SET body = ?", body)


def resealed(path: Path, **changed: Any) -> None:
    with closing(sqlite3.connect(path)) as c:
        row = dict(zip(COLUMNS, c.execute(f"SELECT {', '.join(COLUMNS)} FROM line").fetchone(), strict=True)) | changed
    row["seal"] = seal_of("line", row)
    alter(path, f"UPDATE line SET {', '.join(f'{n} = ?' for n in COLUMNS)}", *row.values())


def _point(**now: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["points"][0].update(now)


def _build(**now: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["builds"][body["points"][0]["build"]].update(now)


def _board(**now: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["boards"][body["points"][0]["board"]].update(now)


FORGED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "dynamic is text": (_point(dynamic="x"), "dynamic field is 'x'"),
    "dynamic is true": (_point(dynamic=True), "dynamic field is True"),
    "dynamic below zero": (_point(dynamic=-64), "dynamic field is -64"),
    "us is text": (_point(us="x"), "time of what is measured is 'x'"),
    "us below zero": (_point(us=-1), "time of what is measured is -1"),
    "us is zero": (_point(us=0), "time of what is measured is 0"),
    "us is missing": (_point(us=None), "time of what is measured is None"),
    "a gift": (_point(how="gift"), "provenance is 'gift'"),
    "carried with a time": (_point(how="carried"), "time of what is carried is"),
    "margin is text": (_point(margin="x"), "margin is 'x'"),
    "reason is a list": (_point(reason=[1]), r"reason is \[1\]"),
    "runtime is a list": (_point(runtime={"batch": [1]}), r"batch among its runtime fields is \[1\]"),
    "id is a path": (_point(id="../x"), "id is '../x'"),
    "stale is text": (_point(stale="no"), "stale is 'no'"),
    "a build from the end": (_point(build=-1), "build is -1"),
    "a board from the end": (_point(board=-1), "board is -1"),
    "entries are text": (_build(entries={"toy": "x"}), "cannot be read"),
    "registers below zero": (
        lambda body: body["builds"][body["points"][0]["build"]]["entries"]["toy"].update(registers=-1),
        "registers is -1",
    ),
    "entry point of an escape": (_build(entries={"\x1b[2J": dict.fromkeys(
        ("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "static_smem_bytes"), 1)}),
        r"entry point is '\\x1b\[2J'"),
    "key is a path": (_build(key="../../../x"), "key is '../../../x'"),
    "image is a path": (_build(image="../x"), "image is '../x'"),
    "source is text": (_build(source="x"), "source is 'x'"),
    "target is an option": (_build(target="--x"), "target is '--x'"),
    "nvrtc is text": (_build(nvrtc=["x", 1]), r"NVRTC is \('x', 1\)"),
    "config is a list": (_build(config={"block_n": [1]}), r"block_n among its configuration is \[1\]"),
    "SMs are text": (_board(num_sms="132"), "num_sms is '132'"),
    "board of an escape": (_board(name="\x1b]0;x\a"), r"board's name is '\\x1b"),
    "bandwidth below zero": (_board(mem_gbps=-1), "mem_gbps is -1"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_what_was_forged_with_a_seal_of_its_own_is_not_served(
    path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Types and values are looked at, and a lookup raises nothing."""
    forge, says = FORGED[case]
    with closing(sqlite3.connect(path)) as c:
        body = json.loads(c.execute("SELECT body FROM line").fetchone()[0])
    forge(body)
    resealed(path, body=json.dumps(body, sort_keys=True, separators=(",", ":")))
    with opened(path) as r:
        with pytest.raises(CorruptRecord, match=says):
            r.line("toy", KEY, "sm90")
        assert ask(r) is None
        assert r.winners() == []
    assert "looking on without it" in caplog.text
    assert "\x1b" not in caplog.text


def test_a_line_of_something_else_is_not_served(path: Path) -> None:
    """Though its seal holds: an index that is damaged finds another row."""
    with closing(sqlite3.connect(path)) as c:
        body, id = c.execute("SELECT body, id FROM line").fetchone()
    other = problem_key(KERNEL, Problem(head_dim=256)).static_key
    resealed(path, static_key=other)
    with opened(path) as r, pytest.raises(CorruptRecord, match="compiled-in fields"):
        r.line("toy", KEY, "sm90")
    other_body = body.replace('"static":{"head_dim":128}', '"static":{"head_dim":256}')
    assert other_body != body
    resealed(path, body=other_body)
    with opened(path) as r, pytest.raises(CorruptRecord, match="another's name"):
        r.line("toy", KEY, "sm90")
    resealed(path, static_key=KEY, body=json.dumps(json.loads(body) | {"v": 2}), id=id)
    with opened(path) as r, pytest.raises(CorruptRecord, match=r"version 2.* reads 1"):
        r.line("toy", KEY, "sm90")


def test_a_damaged_image_costs_its_own_winner(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alter(path, "UPDATE artifact SET blob = zeroblob(50)")
    with opened(path) as r:
        assert ask(r) is None
    assert "does not match its own digest" in caplog.text


@pytest.mark.parametrize("revoke", ["build", "measurement"])
def test_what_is_revoked_anywhere_is_not_served(path: Path, tmp_path: Path, revoke: str) -> None:
    with opened(path) as r, Store.open(tmp_path / "other.db", name="other") as other:
        (point,) = [p for p in line_in(r).points if p.winner.latency_us == 10.0]
        other.revoke(point.winner.build_id if revoke == "build" else point.measurement_id, "it hangs")
        found = lookup([r, other], KERNEL, Problem(), Target.of(H200))
        assert found is None or found.id != point.winner.id


def test_a_revocation_that_comes_in_meanwhile_counts(path: Path, reader: Reader) -> None:
    found = ask(reader)
    assert found is not None
    with Store.open(path) as store:
        store.revoke(found.build_id, "it hangs")
    then = ask(reader)
    assert then is None or then.build_id != found.build_id
    assert reader.revoked() == {found.build_id: "it hangs"}


@pytest.mark.parametrize(("place", "says"), [
    ("absent.db", "no such file"), ("notes.txt", "is not an SQLite database"),
    ("notes.kgdb", "is no sealed database"), ("half.db", "is cut short"), (".", "is a folder, not a database"),
    ("fifo", "is no regular file"), ("x" * 300, "File name too long"), ("newer.db", "newer kerngen"),
    ("other.db", "is an SQLite database, but not a tuning database"),
])  # fmt: skip
def test_what_cannot_be_served_says_why(path: Path, place: str, says: str) -> None:
    folder = path.parent
    for name in ("notes.txt", "notes.kgdb"):
        (folder / name).write_text("Not a database, and somebody's work. " * 9)
    os.mkfifo(folder / "fifo")
    (folder / "half.db").write_bytes(path.read_bytes()[:2048])
    shutil.copy(path, folder / "newer.db")
    alter(folder / "newer.db", "UPDATE kerngen_alembic SET version_num = '9999'")
    with closing(sqlite3.connect(folder / "other.db")) as c:
        c.execute("CREATE TABLE songs (name TEXT)")
    with pytest.raises(DatabaseError, match=says) as caught:
        open_source(folder / place)
    assert str(folder / place) in str(caught.value)


# ---- whose it is


@pytest.mark.parametrize("beside", ["", "-wal", "-shm", "-journal"])
def test_what_another_user_may_have_written_is_not_served(
    path: Path, beside: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = path.with_name(path.name + beside)
    file.touch()
    os.chmod(file, 0o666)
    with pytest.raises(TrustError, match=f"tuning.db{beside} .*written by everyone"):
        open_source(path)
    with pytest.raises(TrustError, match="written by everyone"):
        api.find_winner("rmsnorm", {}, target="H200", db=path)
    monkeypatch.setenv("KERNGEN_DB", str(path))
    assert at_hand(default_sources(), Target.of(find_device("H200"))) == []
    assert "looking on without it" in caplog.text
    assert "KERNGEN_TRUST_FILES" in caplog.text
    monkeypatch.setenv("KERNGEN_TRUST_FILES", "1")
    if beside != "-journal":  # an empty one is rolled back by whoever may write
        (found,) = at_hand(default_sources(), Target.of(find_device("H200")))
        assert ask(found) is not None
        found.close()


def test_what_lies_beside_what_a_link_leads_to_is_looked_at(path: Path, tmp_path: Path) -> None:
    """In a folder that all may write to, as /tmp, anyone may put a log beside a file of ours."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    link = tmp_path / "link.db"
    link.symlink_to(shutil.move(path, tmp_path / "shared" / "there.db"))
    with opened(link) as there:
        assert ask(there) is not None
    log = tmp_path / "shared" / "there.db-wal"
    log.touch()
    log.chmod(0o666)
    with pytest.raises(TrustError, match=r"there\.db-wal .*by everyone"):
        open_source(link)


# ---- sealed files


Bundle = Callable[..., Path]


@pytest.fixture
def bundle(path: Path, tmp_path: Path) -> Bundle:
    def make(*keys: SecretKey, then: str = "") -> Path:
        """A sealed copy, signed by `keys`; `then`: done to its image by hand."""
        made = tmp_path / "made.kgdb"
        seal(path, made, {"name": "made"}, keys=keys)
        if then:
            made.chmod(0o644)
            data = made.read_bytes()
            size = json.loads(data[data.index(b'{"image":{"bytes":') :].partition(b"}")[0] + b"}}")["image"]["bytes"]
            image = tmp_path / "image"
            image.write_bytes(data[:size])
            with closing(sqlite3.connect(image)) as c:
                c.executescript(then)
            assert image.stat().st_size == size, "a change that keeps the length, as a careful hand makes it"
            changed = bytearray(image.read_bytes())
            changed[24:28], changed[92:96], changed[40:44] = data[24:28], data[92:96], data[40:44]
            made.write_bytes(bytes(changed) + data[size:])
        return made

    return make


def test_a_sealed_file_is_served_if_who_signed_it_is_trusted(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    with pytest.raises(TrustError, match=r"made\.kgdb is not signed"):
        open_source(bundle())
    with pytest.raises(TrustError, match=r"no key.*trusted"):
        open_source(bundle(ANN))
    trust.trust(ANN.public)
    with open_source(bundle(ANN)) as signed, opened(path) as plain:
        assert isinstance(signed, Reader)
        assert [w.id for w in signed.winners()] == [w.id for w in plain.winners()] != []
        found = ask(signed)
        assert found.cubin is not None
    with open_source(bundle(), allow_unsigned=True) as allowed:
        assert ask(allowed) is not None
    monkeypatch.setenv("KERNGEN_TRUST_UNSIGNED", "1")
    with open_source(bundle()) as unsigned:
        assert ask(unsigned) is not None


@pytest.mark.parametrize("then", [
    "UPDATE line SET seal = replace(seal, substr(seal, 1, 1), 'x')",
    "UPDATE line SET body = replace(body, '\"us\":10.0', '\"us\":99.0')",
    "UPDATE artifact SET blob = zeroblob(length(blob))",
    "DELETE FROM line",
])  # fmt: skip
def test_what_is_changed_in_a_sealed_file_is_not_served(bundle: Bundle, then: str) -> None:
    trust.trust(ANN.public)
    with open_source(bundle(ANN, then=then)) as changed:
        assert ask(changed) is None


def test_a_line_sealed_anew_by_hand_is_in_no_sealed_file(path: Path, bundle: Bundle) -> None:
    """The seal of a row has no key; the file's signature does."""
    trust.trust(ANN.public)
    with closing(sqlite3.connect(path)) as c:
        row = dict(zip(COLUMNS, c.execute(f"SELECT {', '.join(COLUMNS)} FROM line").fetchone(), strict=True))
    row["body"] = row["body"].replace('"us":10.0', '"us":99.0')
    text = "".join(f"UPDATE line SET {n} = '{v}';" for n, v in (row | {"seal": seal_of("line", row)}).items())
    with open_source(bundle(ANN, then=text)) as changed, pytest.raises(CorruptRecord, match="its own seal"):
        changed.line("toy", KEY, "sm90")


def test_where_a_revocation_was_taken_out_nothing_is_served(
    path: Path, bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    trust.trust(ANN.public)
    with Store.open(path) as store:
        store.revoke("0" * 64, "not of this line")
    with open_source(bundle(ANN)) as whole:
        assert ask(whole) is not None
    with open_source(bundle(ANN, then="DELETE FROM revocation")) as changed:
        assert ask(changed) is None
    assert "0 of 1 revocations are there" in caplog.text


def test_a_sealed_file_of_an_older_schema_is_served_whole_or_not(tmp_path: Path) -> None:
    """A copy in memory is migrated, where nobody asks of each row whether it was sealed."""
    trust.trust(ANN.public)
    sealed = tmp_path / "old.kgdb"
    seal(Path(__file__).parent / "schema1.sqlite", sealed, {"name": "old"}, keys=[ANN])
    with open_source(sealed) as old:
        assert isinstance(old, Store)
        assert old.winners() != []
    sealed.chmod(0o644)
    changed = bytearray(sealed.read_bytes())
    changed[4096 + 500] ^= 1
    sealed.write_bytes(changed)
    with pytest.raises(CorruptRecord, match=r"changed since.*sealed"):
        open_source(sealed)


def test_a_warning_about_bytes_that_are_no_text_can_be_written(
    path: Path, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    alter(path, "UPDATE line SET arch = CAST(X'736D39B0' AS TEXT)")  # sm9 and a byte that is no UTF-8
    assert reader.winners() == []
    assert r"sm9\udcb0 does not match its own seal" in caplog.text
    with Store.open(path) as store:
        alter(path, "UPDATE measurement SET id = CAST(X'61B0' AS TEXT) WHERE rowid = 1")
        store.measurements()
    assert r"measurement a\udcb0 cannot be read" in caplog.text
    caplog.text.encode()


def test_flipped_bits_give_the_winner_or_none(path: Path, bundle: Bundle, tmp_path: Path) -> None:
    """Anywhere in a file without leaves (test_torture.py flips those of sealed ones): opening it may be refused, and
    asking it never raises, nor answers what was never recorded.

    Where the winner itself was hit, the next in order may answer, whole: the prediction of a board of its kind, or a
    winner of another version's code, which is said to be stale.
    """
    trust.trust(ANN.public)
    with closing(sqlite3.connect(path)) as c:
        c.execute("PRAGMA journal_mode = delete")
    whole = path.read_bytes()
    right = {}
    with open_source(bundle(ANN)) as source:
        for tokens in (64, 128):
            right[tokens] = ask(source, Problem(num_tokens=tokens))
        recorded = [(w.config, w.build_id, w.latency_us) for w in source.winners()]
    random_bits, flipped = random.Random(11), tmp_path / "flipped.db"
    refused = missed = served = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(random_bits.choice((1, 8))):
            data[random_bits.randrange(len(data))] ^= 1 << random_bits.randrange(8)
        flipped.write_bytes(data)
        try:
            source = open_source(flipped)
        except DatabaseError:
            refused += 1
            continue
        with source:
            for tokens, expected in right.items():
                assert expected is not None
                if (found := ask(source, Problem(num_tokens=tokens))) is None:
                    missed += 1
                    continue
                served += 1
                assert (found.config, found.build_id, found.latency_us) in recorded
                if found.build_id == expected.build_id:
                    assert found.cubin is None or found.cubin == expected.cubin
                else:
                    assert found.provenance == "predicted" or (found.stale and found.cubin is None)
    assert min(refused, missed, served) > 0, (refused, missed, served)


def test_a_file_and_its_rows_say_the_same(tmp_path: Path) -> None:
    """Of what 60 random trials of three versions on four boards left, asked for every size on every board."""
    rng = random.Random(5)
    boards = [H200, KIN, replace(H200, name="H200 MIG 1g.18gb", num_sms=16), replace(H200, name="twin", mem_gbps=4750)]
    path = tmp_path / "random.db"
    with Store.open(path, name="random") as store:
        for _ in range(60):
            problem = Problem(batch=rng.choice((1, 8)), num_tokens=rng.choice((1, 4, 16, 64)))
            version, block_n = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 4))
            how = rng.choice(("measured", "predicted"))
            record(store, make_kernel(version), block_n, rng.uniform(1, 9), problem=problem, device=rng.choice(boards),
                   provenance=how)  # fmt: skip
        with open_source(path, name="random") as source:
            answers = 0
            for version in (1, 2, 4):
                for board in boards:
                    for batch in (1, 8):
                        kernel, target = make_kernel(version), Target.of(board)
                        one = WinnerTable([source], kernel, Problem(), target)
                        two = WinnerTable([store], kernel, Problem(), target)
                        for tokens in range(70):
                            problem = Problem(batch=batch, num_tokens=tokens)
                            a, b = one.answer(problem), two.answer(problem)
                            assert (a is None) == (b is None)
                            if a is not None and b is not None:
                                assert a == replace(b, why={})
                                answers += 1
    assert answers > 500
