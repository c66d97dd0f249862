"""Databases compared, counted, and made smaller: `kerngen db diff`, `stats`, `revoke`, `rm` and `gc`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import Kerngen
from test_merge import FACTS, KEY, derive, rows
from test_tuning_db import H100, H200, add_build, key_of, make_cubin, measured, predicted

from kerngen.tuning_db import Store
from kerngen.tuning_db.dist.diff import diff
from kerngen.tuning_db.store.prune import gc, rm
from kerngen.tuning_db.store.stats import stats


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    where = tmp_path / "mine.db" if request.param == "sqlite" else request.getfixturevalue("postgresql_url")
    with Store.open(where) as made:
        with made.transaction():
            for n in (1, 2, 4, 5, 7, 9, 13, 15, 16):
                FACTS[n](made)
            derive(made)
        yield made


def test_a_prediction_is_never_compared_with_a_measurement(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.db") as a, Store.open(tmp_path / "b.db") as b:
        for s, how in ((a, predicted), (b, measured)):
            s.add_measurement(how(add_build(s, 1), 1, 10.0))
            s.add_measurement(measured(add_build(s, 1), 1, 10.0 if s is a else 11.0, problem=key_of(128), run="x"))
            s.add_measurement(measured(add_build(s, 2), 2, 4.0, problem=key_of(256 if s is a else 512)))
            derive(s)
        changes, same = diff(a.winners(), b.winners())
        told = {c.here.problem.dynamic: (c.kind, c.provenance, c.percent) for c in changes}
    assert same == 0
    assert told == {
        64: ("time", "predicted -> measured", None),
        128: ("time", "measured", pytest.approx(10.0)),
        256: ("gone", "measured", None),
        512: ("new", "measured", None),
    }
    assert diff(a_winners := [c.after for c in changes if c.after], a_winners) == ([], 3)


def test_what_is_counted(store: Store) -> None:
    told = stats(store)
    assert told["rows"]["winner"] == len(store.winners())
    assert told["runs"] == 3
    by = {(t["device"], t["provenance"]): (t["winners"], t["outcomes"]) for t in told["trials"]}
    assert by["H200", "measured"] == (1, {"ok": 3, "wrong_result": 1})
    assert by["H100", "measured"][0] == 1


def test_gc_removes_idle_images_and_nothing_else(store: Store) -> None:
    store.keep_image(make_cubin(20))
    before = rows(store)
    said = gc(store, dry_run=True)
    assert rows(store) == before
    done = gc(store)
    assert done.removed == said.removed
    assert done.image_bytes == said.image_bytes > 0
    after = rows(store)
    for table in ("measurement", "build", "winner", "search", "rendered", "revocation"):
        assert after[table] == before[table], table
    assert {store.build(w.build_id).image_sha for w in store.winners()} == {a[0] for a in after["artifact"]}
    assert gc(store).removed == {}
    assert lines_are_derived(store)


def lines_are_derived(store: Store) -> bool:
    before = rows(store)["line"]
    store.rewrite_lines()
    return rows(store)["line"] == before


def test_rm_forgets_a_board_and_chooses_anew(store: Store) -> None:
    before = rows(store)
    rm(store, devices=["H200"], dry_run=True)
    assert rows(store) == before
    done = rm(store, devices=["H200"])
    assert done.removed["measurement"] == 5
    assert {w.device for w in store.winners()} == {H100}
    assert {o.measurement.device for o in store.measurements()} == {H100}
    assert lines_are_derived(store)
    rm(store, kernels=["toy"])
    assert {name: len(r) for name, r in rows(store).items() if r} == {}


def test_rm_of_what_was_wrong_elsewhere(store: Store) -> None:
    """A source is not chosen if it was wrong on any board: once that is forgotten, it may be."""
    assert next(w.config for w in store.winners(device=H200)) != {"block_n": 2}
    with store.transaction():
        store.add_measurement(measured(add_build(store, 3), 3, None, outcome="wrong_result", reason="x", run="z",
                                       device=H200))  # fmt: skip
        derive(store)
    assert store.winners(device=H100) == []
    rm(store, devices=["H200"])
    assert [w.config for w in store.winners(device=H100)] == [{"block_n": 3}]
    assert store.builds(KEY).keys() == {w.build_id for w in store.winners()}


def test_the_commands(kerngen: Kerngen) -> None:
    """On what is shipped: exported, compared, imported, counted, revoked, forgotten."""
    small = ("--arch", "sm90", "--kernel")
    assert kerngen("db", "export", *small, "rmsnorm,gelu_gate", "-o", "old.kgdb")[0] == 0
    assert kerngen("db", "export", *small, "rmsnorm", "-o", "new.kgdb")[0] == 0
    told = json.loads(kerngen("db", "diff", "old.kgdb", "new.kgdb", "--json")[1])
    assert {c["kind"] for c in told["changes"]} == {"gone"}
    assert {c["kernel"] for c in told["changes"]} == {"gelu_gate"}
    assert told["same"] == 20
    assert f"20 points are the same; {len(told['changes'])} gone" in kerngen("db", "diff", "old.kgdb", "new.kgdb")[1]
    assert kerngen("db", "import", "new.kgdb")[0] == 0
    counted = json.loads(kerngen("db", "stats", "--json", "--db", "tuning.db")[1])
    assert [(t["kernel"], t["winners"]) for t in counted[0]["trials"]] == [("rmsnorm", 20)]
    which = ("rmsnorm", "--problem", "num_tokens=64,hidden=5376", "--arch", "sm90")
    shown = json.loads(kerngen("db", "show", *which, "--json")[1])
    out = kerngen.ok("db", "revoke", *which, "--reason", "wrong on driver 580", "--json")
    assert json.loads(out)["revoked"] == shown["build_id"]
    assert json.loads(out)["winners"] > 0
    code, out, _ = kerngen("db", "show", *which, "--json")
    assert code != 0 or json.loads(out)["build_id"] != shown["build_id"], "nor is the shipped one served"
    code, out, _ = kerngen("db", "revoke", shown["measurements"][0]["id"][:16], "--reason", "clock was low")
    assert (code, out.split()[0]) == (0, "trial")
    assert kerngen("db", "rm", "--kernel", "rmsnorm", "--json")[0] == 0
    assert json.loads(kerngen("db", "stats", "--json", "--db", "tuning.db")[1])[0]["rows"]["measurement"] == 0
    code, _, err = kerngen("db", "gc", "--db", "new.kgdb")
    assert (code, "new.kgdb is sealed" in err) == (2, True)
