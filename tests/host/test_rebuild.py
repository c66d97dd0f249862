"""After a change of a kernel's source: what was measured of the same machine code holds, and the winner says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from toy import toy_kernels

from kerngen.arch import Target, find_device
from kerngen.cli.db import db
from kerngen.compiler import render as rendering
from kerngen.compiler.compile import compile_cubin
from kerngen.errors import TuningMiss
from kerngen.templates.kernel import Kernel, fields_of, static_fields
from kerngen.tuning_db import Measurement, Store, Winner, lookup, problem_key
from kerngen.tuning_db.dist.verify import LEVELS, verify

V100 = Target.of(find_device("V100"))


class Code:
    """The kernel's files as they are now: what they render, and their source digest."""

    def __init__(self) -> None:
        self.closure, self.was, self.now = "first", "", ""
        self._source_of = rendering.source_of

    def change(self, was: str, now: str) -> None:
        self.closure, self.was, self.now = f"{was} to {now}", was, now

    def source_of(self, *args: Any) -> str:
        return str(self._source_of(*args)).replace(self.was, self.now) if self.was else str(self._source_of(*args))


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Code:
    code = Code()
    monkeypatch.setattr("kerngen.compiler.render.source_of", code.source_of)
    for place in ("kerngen.compiler.source_digest.source_digest_of", "kerngen.bundles.rebuild.source_digest_of"):
        monkeypatch.setattr(place, lambda kernel: code.closure)
    return code


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Kernel]:
    monkeypatch.setenv("KERNGEN_CACHE_DIR", str(tmp_path / "cache"))
    with toy_kernels(monkeypatch) as scale:
        yield scale


@pytest.fixture
def path(kernel: Kernel, code: Code, tmp_path: Path) -> Path:
    """A database in which 64 threads were measured to be faster than the default's 32."""
    path = tmp_path / "tuning.db"
    problem = kernel.problem_type(num_tokens=16)
    key = problem_key(kernel, problem)
    with Store.open(path) as store:
        for threads, us in ((32, 4.0), (64, 2.0)):
            config = kernel.config_type(threads)
            source = rendering.render(kernel, problem, config, V100)
            build = store.add_build(compile_cubin(source, V100.arch), "scale", source, fields_of(config),
                                    static_fields(problem), notes=[code.closure])  # fmt: skip
            row = Measurement(key, "sm70", V100.device, fields_of(config), build, "ok", "measured", p50_us=us,
                              error_abs=0.0)  # fmt: skip
            store.add_measurement(row)
        store.recompute_winners(kernel, key.static_key, V100)
    return path


def served(path: Path, kernel: Kernel) -> Winner:
    with Store.open(path, read_only=True) as store:
        found = lookup([store], kernel, kernel.problem_type(num_tokens=16), V100)
    assert found is not None
    return found


def rebuild(path: Path, *options: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(db, ["rebuild", "--db", str(path), "--jobs", "1", "--json", *options],
                              catch_exceptions=False)  # fmt: skip
    assert done.exit_code == 0, done.output
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_a_rewriting_that_compiles_to_the_same_costs_nothing(path: Path, kernel: Kernel, code: Code) -> None:
    before = served(path, kernel)
    code.change("* 2.0f", "* (2.0f)")
    held = served(path, kernel)
    assert (held.stale, held.cubin) == (False, None), "the choice holds, the machine code is of another source"
    (row,) = rebuild(path)
    assert (row["outcome"], row["now"]["stale"]) == ("adopted", False)
    assert row["now"]["reason"].endswith("measured on a build of another source with the same machine code")
    after = served(path, kernel)
    assert (after.config["threads"], after.latency_us, after.stale) == (64, 2.0, False)
    assert after.cubin is not None
    assert after.cubin.image == before.cubin.image
    assert after.build_id != before.build_id
    assert [(v.level, v.faults) for v in verify(str(path), LEVELS[:2])] == [("structure", []), ("digests", [])]
    (row,) = rebuild(path)
    assert row["outcome"] == "current"


def test_what_it_rests_on_is_shown(path: Path, kernel: Kernel, code: Code) -> None:
    code.change("* 2.0f", "* (2.0f)")
    (row,) = rebuild(path)
    for command in ("show", "explain"):
        done = CliRunner().invoke(
            db, [command, row["now"]["winner"], "--db", str(path), "--json"], catch_exceptions=False
        )
        assert done.exit_code == 0, done.output
        told = json.loads(done.stdout)
        if command == "show":
            assert [m["p50_us"] for m in told["measurements"]] == [2.0]
        else:
            assert [(n["us"], n["is_winner"]) for n in told["near"]] == [(2.0, True), (4.0, False)]


def test_both_versions_of_the_kernel_keep_their_winners(path: Path, kernel: Kernel, code: Code) -> None:
    before = served(path, kernel)
    code.change("* 2.0f", "* (2.0f)")
    rebuild(path)
    after = served(path, kernel)
    code.change("", "")
    code.closure = "first"
    assert served(path, kernel).build_id == before.build_id
    assert before.id != after.id
    with Store.open(path, read_only=True) as store:
        assert {w.id for w in store.winners(every=True)} == {before.id, after.id}
        assert [w.id for w in store.winners()] == [before.id], "listed is what is served"


def test_a_choice_holds_for_other_machine_code_of_the_revision(path: Path, kernel: Kernel, code: Code) -> None:
    before = served(path, kernel)
    code.change("* 2.0f", "* 3.0f")
    (row,) = rebuild(path)
    assert (row["outcome"], row["now"]["stale"]) == ("changed", False)
    after = served(path, kernel)
    assert (after.config["threads"], after.latency_us, after.stale) == (64, 2.0, False)
    assert "earlier source" in after.reason
    assert "earlier source" in after.source
    assert after.cubin is not None
    assert before.cubin is not None
    assert after.cubin.image != before.cubin.image, "what runs is of today's source"


def test_a_raised_revision_makes_what_was_tuned_older(
    path: Path, kernel: Kernel, code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    code.change("* 2.0f", "* 3.0f")
    monkeypatch.setattr(kernel.spec, "BODIES", tuple(replace(b, revision=2) for b in kernel.spec.BODIES))
    (row,) = rebuild(path)
    assert (row["outcome"], row["now"]["stale"]) == ("changed", True)
    after = served(path, kernel)
    assert (after.config["threads"], after.stale) == (64, True)
    assert "older source" in after.reason


def test_what_is_revoked_of_one_build_is_of_its_like(path: Path, kernel: Kernel, code: Code) -> None:
    first = served(path, kernel)
    code.change("* 2.0f", "* (2.0f)")
    rebuild(path)
    with Store.open(path) as store:
        store.revoke(first.build_id, "hangs")
        store.recompute_winners(kernel, first.problem.static_key, V100)
        assert [w.config["threads"] for w in store.winners(every=True)] == [32], (
            "for older code it does not stay either"
        )


def test_a_note_alone_where_the_source_is_the_same(path: Path, kernel: Kernel, code: Code) -> None:
    """A comment of the template's own, which is not rendered."""
    code.closure = "second"
    (row,) = rebuild(path)
    assert (row["outcome"], row["now"]["stale"]) == ("current", False)
    with Store.open(path, read_only=True) as store:
        assert store.rendered(problem_key(kernel, kernel.problem_type()).static_key, "second")


def test_what_the_kernel_takes_no_longer_is_named(
    path: Path, kernel: Kernel, code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel.spec, "why_invalid", lambda *args: "threads=64 is too few")
    (row,) = rebuild(path)
    assert row["outcome"] == "refused"
    assert "threads=64 is too few" in row["reason"]


def test_what_does_not_compile_is_named(path: Path, kernel: Kernel, code: Code) -> None:
    code.change("* 2.0f", "* 2.0f +")
    done = CliRunner().invoke(db, ["rebuild", "--db", str(path), "--jobs", "1"], catch_exceptions=False)
    assert done.exit_code == 1
    assert "1 do not compile" in done.stdout
    assert "failed: scale on sm70 (1): NVRTC rejected" in done.stdout


def test_where_compiling_is_forbidden(path: Path, kernel: Kernel, code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    code.change("* 2.0f", "* 3.0f")
    monkeypatch.setenv("KERNGEN_NO_COMPILE", "1")
    with pytest.raises(TuningMiss, match="KERNGEN_NO_COMPILE"):
        rebuild(path)
