"""Names out of a database, a bundle or a model folder: no path leaves its folder, nothing reaches a terminal raw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from command import Kerngen
from test_tuning_db import H200, OPTIONS, STATIC, key_of, make_cubin, measured, source_of

from kerngen.arch import Target
from kerngen.compiler.cache import CompileCache
from kerngen.errors import CacheError
from kerngen.system.files import file_name
from kerngen.tuning_db import Store


@pytest.fixture
def kerngen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kerngen:
    (tmp_path / "here").mkdir()
    made = Kerngen(tmp_path, monkeypatch, capsys)
    monkeypatch.chdir(tmp_path / "here")
    return made


def fill(path: Path, kernel: str, board: str) -> None:
    """A database with one winner of such a kernel on such a board; its digests are as they should be."""
    device = replace(H200, name=board)
    with Store.open(path) as store:
        build = store.add_build(make_cubin(), kernel, source_of(0), {"block_n": 0}, STATIC, options=OPTIONS)
        key = replace(key_of(), kernel=kernel)
        store.add_measurement(measured(build, 0, 10.0, problem=key, device=device))
        assert store.recompute_winners(kernel, key.static_key, Target.of(device))


@pytest.mark.parametrize(("kernel", "board"), [
    ("../../../x", "H200"), ("toy", ".."), ("toy", "../../y"), ("toy", "/tmp/absolute"), ("toy", "b" * 300),
    (".hidden", "."),
])  # fmt: skip
def test_dump_writes_in_its_folder_alone(kerngen: Kerngen, kernel: str, board: str) -> None:
    fill(kerngen.folder / "other.db", kernel, board)
    before = set(kerngen.folder.rglob("*"))
    code, _, err = kerngen("db", "dump", "--db", "../other.db", "-o", "a/b/text")
    made = {p.resolve() for p in set(kerngen.folder.rglob("*")) - before if p.suffix == ".txt"}
    assert all(p.is_relative_to(kerngen.folder / "here/a/b/text") for p in made), made
    assert not Path("/tmp/absolute").exists()
    assert (code, len(made)) in ((0, 1), (2, 0)), err


def test_two_names_that_make_one_file_name_are_two_files(kerngen: Kerngen) -> None:
    fill(kerngen.folder / "other.db", "toy", "a/b")
    fill(kerngen.folder / "other.db", "toy", "a b")
    kerngen.ok("db", "dump", "--db", "../other.db", "-o", "text")
    assert len(list(Path("text").rglob("*.txt"))) == 2


def test_a_file_name_is_one_name() -> None:
    for text in ("", ".", "..", "../../x", "/etc/passwd", "a\0b", "a\nb", "é" * 500, "H200 NVL", "\udc80"):
        name = file_name(text)
        assert Path(name).name == name
        assert not name.startswith(".")
        assert len(name.encode()) <= 100
    assert file_name("RTX-6000_Ada.v2") == "RTX-6000_Ada.v2"


def test_a_key_out_of_a_database_names_no_other_file(tmp_path: Path) -> None:
    for key in ("../../../../x", "/tmp/x", "", "A" * 64, "a" * 63):
        with pytest.raises(CacheError, match="no key of a compiled image"):
            CompileCache(tmp_path).path(key)
        with pytest.raises(CacheError, match="no key of a compiled image"):
            CompileCache(tmp_path).put(replace(make_cubin(), key=key))
    assert list(tmp_path.iterdir()) == []
