"""The shipped databases: whole, read-only, measured, and asked by every run."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from kerngen.arch import ARCHES, Device, Target
from kerngen.compile import elf_resources
from kerngen.errors import UsageError
from kerngen.templates import find_kernel
from kerngen.tuning_db import Store, default_stores, lookup
from kerngen.tuning_db.serve.places import PREBUILT

FILES = sorted(PREBUILT.glob("*.sqlite"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_prebuilt_database_is_whole(path: Path) -> None:
    connection = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()
    with Store.open(path, read_only=True) as store:
        winners = store.winners()
        assert winners
        for winner in winners:
            assert winner.provenance == "measured"
            build = store.build(winner.build_id)
            cubin = store.image(build)  # raises CorruptRecord where the blob does not match its digest
            assert cubin is not None
            limit = ARCHES[build.arch].max_smem_bytes + ARCHES[build.arch].reserved_smem_bytes
            for name, (registers, smem) in elf_resources(cubin.image).items():
                assert 0 < registers <= 255, name
                assert smem <= limit, name


def test_a_prebuilt_database_has_the_newest_schema(caplog: pytest.LogCaptureFixture) -> None:
    """An older one would be read through a copy in memory, made anew by every process."""
    with caplog.at_level("INFO", "kerngen.tuning_db"):
        for path in FILES:
            Store.open(path, sealed=True).close()
    assert caplog.text == ""


@pytest.mark.parametrize("through", ["the path", "a link", "KERNGEN_DB"])
def test_a_prebuilt_database_is_not_written_to(through: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = FILES[0].read_bytes()
    place: str | None = f"sqlite:///{FILES[0]}"
    if through == "a link":
        (tmp_path / "mine.db").symlink_to(FILES[0])
        place = str(tmp_path / "mine.db")
    elif through == "KERNGEN_DB":
        monkeypatch.setenv("KERNGEN_DB", str(FILES[0]))
        place = None
    with pytest.raises(UsageError, match="is shipped with kerngen") as caught:
        Store.open(place)
    assert "--db FILE" in str(caught.value)
    with pytest.raises(UsageError, match="is shipped with kerngen"):
        Store.open(PREBUILT / "new.sqlite")
    assert FILES[0].read_bytes() == before
    assert {p.name for p in PREBUILT.iterdir()} == {"README.md", *(p.name for p in FILES)}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_shipped_winner_is_served(path: Path) -> None:
    """With its machine code, unless its kernel has changed since: then the configuration alone."""
    with Store.open(path, sealed=True) as store:
        for w in store.winners():
            kernel = find_kernel(w.kernel)
            served = lookup([store], kernel, kernel.problem_type(**w.problem.fields), Target(w.arch, w.device))
            assert served is not None, w
            assert (served.id, served.config, served.latency_us) == (w.id, w.config, w.latency_us)
            assert (served.cubin is None) == served.stale


def test_a_run_finds_what_was_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNGEN_DB", str(tmp_path / "none.db"))
    kernel = find_kernel("w4a16_gemm")
    problem = kernel.problem_type(n=5376, k=21504)
    h200 = Device("H200", "sm90", 132, 4814.0, 139.8, 62914560, 1980, 1070.0, "probed")
    winner = lookup(default_stores(), kernel, problem, Target.of(h200))
    assert winner is not None
    assert winner.provenance == "measured"
    assert winner.source.startswith("prebuilt sm90-gemma-4-31b")
    assert kernel.why_invalid(problem, kernel.config_type(**winner.config), Target.of(ARCHES["sm90"])) is None
