"""What is exported gives the same winners, is run if it is trusted, and is verified level by level."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from command import Kerngen
from test_merge import FACTS, KEY, derive, rows
from test_tuning_db import H100, H200, add_build, key_of, measured

from kerngen.arch import Target
from kerngen.errors import DatabaseError, TrustError
from kerngen.tuning_db import Store
from kerngen.tuning_db.dist.export import Selection, export
from kerngen.tuning_db.dist.keys import user_key
from kerngen.tuning_db.dist.verify import LEVELS, verify
from kerngen.tuning_db.read.sealed import Sealed
from kerngen.tuning_db.store import schema as t
from kerngen.tuning_db.store.bundles import open_any, open_bundle
from kerngen.tuning_db.store.merge import merge
from kerngen.tuning_db.store.rows import sealed as resealed


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("KERNGEN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def store() -> Iterator[Store]:
    """Twenty configurations of one problem, and all else that a database may hold."""
    with Store.open("mine.db") as made:
        with made.transaction():
            for n in (1, 2, 3, 5, 8, 9, 11, 12, 13, 15):
                FACTS[n](made)
            for n in range(10, 30):
                build = add_build(made, n, keep_image=False)
                made.add_measurement(measured(build, n, 20.0 + n, at=f"2026-11-22T11:00:{n}+00:00"))
            derive(made)
        yield made


def sealed(store: Store, name: str = "out.kgdb", **options: object) -> Path:
    out = Path(name)
    export([store], Selection(), out, keys=[user_key()], **options)  # type: ignore[arg-type]
    return out


def test_what_is_exported_gives_the_same_winners(store: Store) -> None:
    """From the file alone, chosen anew; the losers stay behind, the rivals come along, and `why` counts all."""
    with open_bundle(sealed(store)) as shipped:
        here, there = rows(store), rows(shipped)
        assert there["winner"] == here["winner"]
        assert len(there["measurement"]) < len(here["measurement"]) - 10
        assert there["search"] == []
        assert {o.measurement.outcome for o in shipped.measurements()} >= {"ok", "wrong_result"} & {
            o.measurement.outcome for o in store.measurements()
        }
        chosen = {w.id: (w.build_id, w.provenance, w.latency_us) for w in shipped.winners()}
        with Store.open("again.db") as again:
            merge(again, [shipped])
            assert {w.id: (w.build_id, w.provenance, w.latency_us) for w in again.winners()} == chosen
        kept = {w.build_id for w in shipped.winners() if shipped.image(shipped.build(w.build_id)) is not None}
        assert kept == {w.build_id for w in store.winners() if store.image(store.build(w.build_id)) is not None}


def test_with_its_history_it_is_all_that_was_observed(store: Store) -> None:
    with open_bundle(sealed(store, history=True)) as shipped:
        here, there = rows(store), rows(shipped)
        for table in ("measurement", "build", "problem", "device", "search", "revocation", "rendered", "winner"):
            assert there[table] == here[table], table


def test_the_same_rows_give_the_same_file(store: Store) -> None:
    first = sealed(store).read_bytes()
    os.remove("out.kgdb")
    assert sealed(store).read_bytes() == first


def test_only_what_was_selected(store: Store) -> None:
    store.add_measurement(measured(add_build(store, 10), 10, 5.0, device=H100, at="x", run="y"))
    store.recompute_winners("toy", KEY, Target.of(H100))
    done = export([store], Selection(devices={"H100"}), Path("out.kgdb"))
    assert done.contents["boards"] == [["sm90", "H100", 132]]
    assert {w.device for w in open_bundle("out.kgdb", allow_unsigned=True).winners()} == {H100}
    done = export([store], Selection(cells={key_of().cell}, devices={"H200"}), Path("out.kgdb"))
    assert {w.problem.cell for w in open_bundle("out.kgdb", allow_unsigned=True).winners()} == {key_of().cell}
    with pytest.raises(DatabaseError, match="no winners"):
        export([store], Selection(kernels={"rmsnorm"}), Path("none.kgdb"))
    assert not Path("none.kgdb").exists()


def test_two_sources_winners_of_one_point_are_chosen_between(store: Store) -> None:
    with Store.open("theirs.db") as theirs:
        for n in (4, 6):
            FACTS[n](theirs)
        derive(theirs)
        export([store, theirs], Selection(devices={"H200"}), Path("out.kgdb"))
    with open_bundle("out.kgdb", allow_unsigned=True) as shipped:
        (winner,) = [w for w in shipped.winners() if w.problem.dynamic == 64]
        assert winner.config == {"block_n": 0}, "I saw 2 fail and revoked 3, which were faster there"
    assert [v.ok for v in verify("out.kgdb", LEVELS[:2])] == [True, True]


def test_a_row_that_was_altered_is_not_exported(store: Store) -> None:
    with closing(sqlite3.connect("mine.db", isolation_level=None)) as connection:
        connection.execute("UPDATE measurement SET p50_us = 1.0 WHERE p50_us = 30.0")
        connection.execute("UPDATE winner SET latency_us = 0.01")
    with pytest.raises(DatabaseError, match="no winners"):
        sealed(store)
    derive(store)
    with open_bundle(sealed(store, history=True)) as shipped:
        assert all(o.measurement.p50_us != 1.0 for o in shipped.measurements())


# ---- what was changed since


def _change(path: Path, sql: str) -> None:
    """As with the sqlite3 shell, and with the tail put back, as whoever means it would."""
    data, head = path.read_bytes(), int(Sealed.open(path).header["image"]["bytes"])
    path.chmod(0o644)
    scratch = path.with_suffix(".image")
    scratch.write_bytes(data[:head])
    with closing(sqlite3.connect(scratch, isolation_level=None)) as connection:
        assert connection.execute(sql).rowcount > 0
    image = bytearray(scratch.read_bytes())
    image[24:28] = image[92:96] = data[24:28]
    assert len(image) == head
    path.write_bytes(bytes(image) + data[head:])


@pytest.mark.parametrize(("sql", "lost"), [
    ("UPDATE winner SET latency_us = 0.5 WHERE latency_us = 6.0", 1),
    ("UPDATE build SET image_sha = 'x' WHERE id IN (SELECT build_id FROM winner WHERE latency_us = 6.0)", 1),
    ("UPDATE measurement SET p50_us = 0.5 WHERE p50_us = 6.0", 1),
    ("DELETE FROM winner WHERE latency_us = 6.0", 1),
    ("UPDATE artifact SET blob = x'00'", 0),
])  # fmt: skip
def test_a_changed_row_is_found_and_not_served(
    store: Store, caplog: pytest.LogCaptureFixture, sql: str, lost: int
) -> None:
    """Not even where its own digests were put right, which the leaves do not let pass: all else is served."""
    path = sealed(store)
    whole = {w.id for w in open_bundle(path).winners()}
    _change(path, sql)
    structure, digests = verify(str(path), LEVELS)
    assert structure.ok
    assert not digests.ok
    assert f"{path} was changed since it was sealed" in digests.faults
    with open_bundle(path) as shipped:
        assert "it is read without what was changed" in caplog.text
        assert len(whole - {w.id for w in shipped.winners()}) == lost


# ---- trust, and the commands


def test_a_disk_that_is_full(store: Store) -> None:
    path = sealed(store, history=True)
    with Store.open("full.db") as into:
        before = rows(into)
        with into.engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")  # of the connection, which is pooled
        with open_any(str(path)) as shipped, pytest.raises(DatabaseError, match="no space left"):
            merge(into, [shipped])
        assert rows(into) == before, "all of it, or nothing"


def test_verify_says_who_signed(store: Store) -> None:
    path = sealed(store)
    assert [(v.level, v.ok) for v in verify(str(path), LEVELS)] == [
        ("structure", True), ("digests", True), ("signature", True),
    ]  # fmt: skip
    assert [v.ok for v in verify("mine.db", LEVELS)] == [True, True, None]
    export([store], Selection(), Path("none.kgdb"))
    *_, last = verify("none.kgdb", LEVELS)
    assert (last.ok, last.faults) == (False, ["it is not signed"])
    with pytest.raises(TrustError):
        open_any("none.kgdb")


def test_the_commands(kerngen: Kerngen) -> None:
    """Exported from what is shipped, verified, proved complete or not, imported, and the same again."""
    which = ("--arch", "sm90", "--kernel", "rmsnorm")
    code, out, err = kerngen("db", "export", *which, "-o", "sm90.kgdb", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["contents"]["boards"] == [["sm90", "H200", 132]]
    assert told["digest"] == Sealed.open("sm90.kgdb").digest
    assert kerngen("db", "verify", "sm90.kgdb")[0] == 0
    of_the_model = ("--model", "gemma-4-31b", "--kernel", "rmsnorm")
    assert kerngen("compile", "--device", "H200", *of_the_model, "-o", "code.kgdb")[0] == 0
    for file, is_complete in (("code.kgdb", True), ("sm90.kgdb", False)):  # what is shipped has no machine code
        code, out, _ = kerngen("db", "verify", file, *of_the_model, "--json")
        *_, last = json.loads(out)["verdicts"]
        assert (code, last["level"], not last["faults"]) == (int(not is_complete), "complete", is_complete)
        assert all(fault.startswith("lacks rmsnorm(") for fault in last["faults"])
    code, out, _ = kerngen("db", "import", "sm90.kgdb", "--dry-run", "--json")
    would = json.loads(out)
    out = kerngen.ok("db", "import", "sm90.kgdb", "--json")
    assert json.loads(out)["added"] == would["added"]
    code, out, _ = kerngen("db", "import", "sm90.kgdb")
    assert "nothing that was not there" in out
    code, _, err = kerngen("db", "merge", "sm90.kgdb", "tuning.db")
    assert code == 2
    assert "sm90.kgdb is sealed" in err


def test_a_complete_bundle_is_proved_so(kerngen: Kerngen) -> None:
    """With --rebuild, byte by byte: what was compiled here is, and what another NVRTC made is said to be."""
    which = ("--model", "gemma-4-31b", "--kernel", "gelu_gate", "--jobs", "1")
    assert kerngen("compile", "--arch", "sm70", *which, "-o", "sm70.kgdb")[0] == 0
    code, out, _ = kerngen("db", "verify", "sm70.kgdb", *which, "--rebuild", "--json")
    verdicts = {v["level"]: v for v in json.loads(out)["verdicts"]}
    assert [v["ok"] for v in verdicts.values()] == [True] * 5, verdicts
    assert code == 0
    assert "builds are the same, byte by byte" in verdicts["rebuilt"]["text"]
    code, out, _ = kerngen("db", "verify", "sm70.kgdb", "--model", "gemma-4-31b", "--kernel", "rmsnorm")
    assert code == 1
    assert "NO  complete" in out


TAKING = (
    "compile --arch sm70 --model gemma-4-31b --kernel embed --db mine.db",
    "compile --arch sm70 --model gemma-4-31b --kernel embed --db sqlite:///mine.db -o x.kgdb",
    "release --arch sm90 --model gemma-4-31b --kernel embed --db mine.db -o dist",
    "db export --db mine.db -o x.kgdb",
    "db import mine.db --db other.db",
    "db merge other.db mine.db",
)


def test_machine_code_that_others_may_have_written_goes_nowhere(
    kerngen: Kerngen, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever wrote it could put its digests right, and whoever takes it along would sign it. Looking at it is free."""
    store.close()
    os.chmod("mine.db", 0o666)
    for command in TAKING:
        code, out, err = kerngen(*command.split())
        assert (code, out) == (1, ""), command
        assert err.startswith("TrustError: mine.db can be written by everyone: it is not served\n  if it is"), err
        assert [p for p in kerngen.files() if p.endswith(".kgdb") or p.startswith("other.db")] == [], command
    assert kerngen("db", "ls", "--db", "mine.db")[0] == 0
    assert kerngen("db", "export", "--db", "mine.db", "--no-images", "-o", "x.kgdb")[0] == 0
    monkeypatch.setenv("KERNGEN_DB", "mine.db")
    monkeypatch.setattr("kerngen.tuning_db.read.places.PREBUILT", kerngen.folder / "none")
    assert kerngen("db", "export", "-o", "y.kgdb")[0] != 0
    assert re.search(r"mine\.db can be written by everyone.*; looking on without it \(.*TRUST_FILES=1", caplog.text)
    monkeypatch.setenv("KERNGEN_TRUST_FILES", "1")
    assert kerngen("db", "export", "-o", "y.kgdb")[0] == 0


def test_the_user_can_say_whom_to_trust(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kerngen("db", "keygen", "release.key")[0] == 0
    assert kerngen("db", "export", "--kernel", "rmsnorm", "--arch", "sm90", "-o", "r.kgdb", "--unsigned")[0] == 0
    code, _, err = kerngen("db", "import", "r.kgdb")
    assert code == 1
    assert "r.kgdb is not signed" in err
    assert kerngen("db", "import", "r.kgdb", "--allow-unsigned", "--dry-run")[0] == 0
    assert kerngen("db", "sign", "r.kgdb", "--key", "release.key")[0] == 0
    assert kerngen("db", "ls", "--db", "r.kgdb")[0] == 1, "nobody trusts that key yet"
    assert kerngen("db", "trust", "release.key.pub")[0] == 0
    assert kerngen("db", "ls", "--db", "r.kgdb")[0] == 0
    assert H200.name in kerngen("db", "verify", "r.kgdb", "--json")[1]


def test_a_line_that_is_not_what_its_rows_give_is_found(store: Store) -> None:
    """A run reads lines alone: one that was sealed anew after its body was changed is no damage to its own seal."""
    assert verify("mine.db", ["digests"])[0].ok
    with store.writing() as connection:
        row = dict(connection.execute(t.line.select()).one()._mapping)
        changed = row | {"body": row["body"].replace("block_n", "block_m", 1)}
        del changed["seal"]
        connection.execute(t.line.update().values(resealed(t.line, changed)))
    (verdict,) = verify("mine.db", ["digests"])
    assert not verdict.ok
    assert "the line of toy on sm90" in verdict.faults[0]
    with store.writing() as connection:
        connection.execute(t.line.delete())
    assert "is missing" in verify("mine.db", ["digests"])[0].faults[0]
