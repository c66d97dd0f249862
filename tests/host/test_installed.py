"""Installed bundles, and those on the search path, are asked after the user's database, and verified each time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from command import Kerngen
from test_merge import FACTS, derive
from test_tuning_db_cli import tune_rmsnorm

from kerngen.arch import Target, find_device
from kerngen.errors import DatabaseError, TrustError, UsageError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import parse_fields
from kerngen.tuning_db import Store, Winner, default_stores, lookup
from kerngen.tuning_db.dist.export import Selection, export
from kerngen.tuning_db.dist.keys import user_key
from kerngen.tuning_db.dist.seal import seal
from kerngen.tuning_db.read import installed as bundles
from kerngen.tuning_db.read.boards import at_hand
from kerngen.tuning_db.read.sealed import Sealed
from kerngen.tuning_db.sources import default_sources


@pytest.fixture
def kerngen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kerngen:
    made = Kerngen(tmp_path, monkeypatch, capsys)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr("kerngen.tuning_db.read.places.PREBUILT", tmp_path / "none")
    return made


def sealed(name: str, *facts: int, signed: bool = True) -> Path:
    with Store.open(f"{name}.sqlite") as store:
        for n in facts:
            FACTS[n](store)
        derive(store)
        export([store], Selection(), Path(f"{name}.kgdb"), keys=[user_key()] if signed else [])
    return Path(f"{name}.kgdb")


def served() -> dict[str, list[object]]:
    """By database that a run asks, the configurations of its winners."""
    stores = default_stores()
    asked = at_hand(default_sources(), Target.of(find_device("H200")))
    assert [s.name for s in asked] == [s.name for s in stores], "a run asks what the commands show"
    try:
        return {s.name: [w.config["block_n"] for w in s.winners()] for s in stores}
    finally:
        for s in stores:
            s.close()


def test_installed_replaced_rolled_back_and_removed(kerngen: Kerngen) -> None:
    first, second = sealed("one", 1), sealed("two", 3)
    assert kerngen("db", "install", str(first), "--name", "mine")[0] == 0
    assert served() == {"bundle mine": [0]}
    os.remove(first)
    assert kerngen("db", "install", str(second), "--name", "mine")[0] == 0
    assert served() == {"bundle mine": [1]}
    told = json.loads(kerngen("db", "install", "--list", "--json")[1])
    assert [(b["name"], b["digest"], len(b["versions"]), b["pinned"]) for b in told] == [
        ("mine", Sealed.open(second).digest, 2, False),
    ]  # fmt: skip
    out = kerngen.ok("db", "install", "--rollback", "mine")
    assert "version 1 of 2" in out
    assert served() == {"bundle mine": [0]}
    code, _, err = kerngen("db", "install", "--rollback", "mine")
    assert (code, "there is no version of mine before" in err) == (2, True)
    assert kerngen("db", "install", str(second), "--name", "mine")[0] == 0
    assert served() == {"bundle mine": [1]}
    assert kerngen("db", "uninstall", "mine")[0] == 0
    assert served() == {}
    assert not list(bundles.folder().glob("*.kgdb"))
    assert "nothing is installed" in kerngen("db", "install")[1]


def test_a_pinned_version_stays(kerngen: Kerngen) -> None:
    first, second = sealed("one", 1), sealed("two", 3)
    bundles.install(first, name="mine", pin=True)
    with pytest.raises(UsageError, match="mine is pinned to"):
        bundles.install(second, name="mine")
    assert bundles.install(first, name="mine").pinned, "the same one again changes nothing"
    assert served() == {"bundle mine": [0]}
    assert bundles.install(second, name="mine", pin=True).active == 1
    bundles.change("mine", pinned=False)
    assert bundles.install(first, name="mine", force=True).versions[-1] == Sealed.open(first).digest
    assert served() == {"bundle mine": [0]}


def test_the_newest_is_asked_first_and_the_users_own_before_all(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        bundles.install(sealed(name, 1))
    os.mkdir("share")
    for name in ("d", "c"):
        sealed(name, 3).rename(f"share/{name}.kgdb")
    alone = sealed("alone", 4)
    monkeypatch.setenv("KERNGEN_DB_PATH", f"{alone}{os.pathsep}share{os.pathsep}nowhere.kgdb{os.pathsep}alone.sqlite")
    with Store.open() as own:
        FACTS[1](own)
    assert list(served()) == ["user", "bundle alone", "bundle c", "bundle d", "bundle b", "bundle a"]


def test_what_nobody_answers_for_is_not_installed_and_not_served(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = sealed("one", 1, signed=False)
    code, _, err = kerngen("db", "install", str(path))
    assert (code, "one.kgdb is not installed: signature: it is not signed" in err) == (1, True)
    monkeypatch.setenv("KERNGEN_DB_PATH", str(path))
    assert served() == {}
    assert "one.kgdb is not signed" in caplog.text
    monkeypatch.delenv("KERNGEN_DB_PATH")
    assert kerngen("db", "install", str(path), "--allow-unsigned")[0] == 0
    assert served() == {"bundle one": [0]}
    assert kerngen("db", "trust", "--remove", Sealed.open(path).digest)[0] == 0
    assert served() == {}, "verified each time, not when it was installed"


def test_damage_is_said_and_all_else_is_served(kerngen: Kerngen, caplog: pytest.LogCaptureFixture) -> None:
    made = bundles.install(sealed("one", 1))
    bundles.install(sealed("two", 3))
    data = made.path.read_bytes()
    made.path.chmod(0o644)
    made.path.write_bytes(data[:-10])
    assert served() == {"bundle two": [1]}
    assert f"{made.path} is no sealed database" in caplog.text
    code, _, err = kerngen("db", "install", str(made.path))
    assert code == 1, err
    made.path.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    code, _, err = kerngen("db", "install", str(made.path))
    assert (code, "is not installed: digests" in err) == (1, True)
    for text in ("{", "[]", '{"kerngen_installed": 2}', '{"kerngen_installed": 1, "bundles": [{"name": 1}]}'):
        (bundles.folder() / "installed.json").write_text(text)
        with pytest.raises(DatabaseError, match=r"installed\.json"):
            bundles.installed()
        assert served() == {}


def test_a_list_that_others_may_write_counts_for_nothing(kerngen: Kerngen, caplog: pytest.LogCaptureFixture) -> None:
    bundles.install(sealed("one", 1))
    (bundles.folder() / "installed.json").chmod(0o666)
    assert served() == {}
    assert "can be written by everyone" in caplog.text


def test_several_install_at_once(kerngen: Kerngen) -> None:
    """No one's is lost."""
    for n in range(4):
        sealed(f"b{n}", 1)
    code = "import sys; from kerngen.tuning_db.read.installed import install; install(sys.argv[1])"
    running = [subprocess.Popen([sys.executable, "-c", code, f"b{n}.kgdb"]) for n in range(4)]
    assert [p.wait(timeout=120) for p in running] == [0] * 4
    assert sorted(b.name for b in bundles.installed()) == ["b0", "b1", "b2", "b3"]


# ---- an older one


@pytest.fixture
def editions(kerngen: Kerngen) -> tuple[Path, Path, str]:
    """Two editions of one bundle: with a winner of rmsnorm, and later with that revoked; and its build's id."""
    tune_rmsnorm(Path("theirs.db"), "")
    keys = [user_key()]
    with Store.open("theirs.db") as store:
        export([store], Selection(), Path("first.kgdb"), keys=keys)
        (build_id,) = {w.build_id for w in store.winners("rmsnorm")}
        FACTS[1](store)
        derive(store)
        store.revoke(build_id, "it was wrong")
        export([store], Selection(kernels={"toy"}), Path("second.kgdb"), keys=keys)
    return Path("first.kgdb"), Path("second.kgdb"), build_id


def rmsnorm() -> Winner | None:
    """What a run is answered."""
    kernel = find_kernel("rmsnorm")
    target = Target.of(find_device("H200"))
    found = lookup(default_sources(), kernel, parse_fields(kernel.problem_type, ""), target)
    with ExitStack() as stack:
        stores = [stack.enter_context(s) for s in default_stores()]
        again = lookup(stores, kernel, parse_fields(kernel.problem_type, ""), target)
    assert (found and found.build_id) == (again and again.build_id), "a run is answered what the commands show"
    return found


def test_an_older_one_is_refused_and_what_was_revoked_stays(kerngen: Kerngen, editions: tuple[Path, Path, str]) -> None:
    first, second, build_id = editions
    assert 0 < Sealed.open(first).sequence < Sealed.open(second).sequence
    kerngen.ok("db", "install", str(first), "--name", "x")
    assert (found := rmsnorm()) is not None
    assert found.build_id == build_id
    kerngen.ok("db", "install", str(second), "--name", "x")
    assert rmsnorm() is None
    code, _, err = kerngen("db", "install", str(first), "--name", "x")
    assert code == 1
    assert "TrustError: x was installed with results up to 20" in err
    assert "--force" in err
    assert bundles.installed()[0].digest == Sealed.open(second).digest
    for command in (("db", "install", "--rollback", "x"), ("db", "install", str(second), "--name", "x"),
                    ("db", "install", str(first), "--name", "x", "--force")):  # fmt: skip
        kerngen.ok(*command)
        assert rmsnorm() is None, "its digest is as it was signed, and it was revoked all the same"
    kerngen.ok("db", "uninstall", "x")
    kerngen.ok("db", "install", str(first), "--name", "x")
    assert rmsnorm() is not None, "whoever removes it starts anew"


def test_a_revocation_outlives_the_file_that_it_came_in(
    kerngen: Kerngen, editions: tuple[Path, Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    first, second, _ = editions
    kerngen.ok("db", "import", str(first))
    assert rmsnorm() is not None
    kerngen.ok("db", "install", str(second))
    assert rmsnorm() is None
    made = bundles.installed()[0]
    made.path.chmod(0o644)
    made.path.write_bytes(b"damaged")
    assert rmsnorm() is None
    made.path.unlink()
    assert rmsnorm() is None
    assert "looking on without it" in caplog.text


def test_what_an_older_kerngen_installed_and_cannot_be_read_is_replaced_by_force_alone(
    kerngen: Kerngen, editions: tuple[Path, Path, str]
) -> None:
    first, second, _ = editions
    made = bundles.install(second, name="x")
    listed = bundles.folder() / "installed.json"

    def forget() -> None:
        stated = json.loads(listed.read_text())
        for b in stated["bundles"]:
            del b["sequence"], b["revoked"]
        listed.write_text(json.dumps(stated))

    forget()
    code, _, err = kerngen("db", "install", str(first), "--name", "x")
    assert (code, "x was installed with results up to" in err) == (1, True), "its file says so"
    data = made.path.read_bytes()
    made.path.chmod(0o644)
    made.path.write_bytes(b"damaged")
    code, _, err = kerngen("db", "install", str(first), "--name", "x")
    assert (code, "what x revoked is not known" in err) == (1, True)
    made.path.write_bytes(data)
    kerngen.ok("db", "install", str(first), "--name", "x", "--force")
    assert rmsnorm() is None, "what could be read of it is known again"


def test_what_says_nothing_of_its_age_is_the_oldest(kerngen: Kerngen, editions: tuple[Path, Path, str]) -> None:
    """As one that an older kerngen sealed."""
    first, second, _ = editions
    shutil.copyfile("theirs.db", "copy.db")
    seal("copy.db", "old.kgdb", {"schema": Sealed.open(first).header["schema"], "name": "x"}, keys=[user_key()],
         stored=sorted(Sealed.open(first).header["stored"]))  # fmt: skip
    assert Sealed.open("old.kgdb").sequence == 0
    bundles.install("old.kgdb", name="x")
    bundles.install(first, name="x")
    with pytest.raises(TrustError, match=r"and old\.kgdb has none after an unknown date"):
        bundles.install("old.kgdb", name="x")
    assert bundles.install(second, name="x").revoked
