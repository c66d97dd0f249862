"""Names out of a database, a bundle or a model folder: no path leaves its folder, nothing reaches a terminal raw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, Kerngen
from test_tuning_db import H200, OPTIONS, STATIC, key_of, make_cubin, measured, source_of

from kerngen.arch import Target
from kerngen.cli.tables import Table, echo, new_console, say
from kerngen.compiler.cache import CompileCache
from kerngen.errors import CacheError, KerngenError, is_printable_name, printable, printable_name
from kerngen.system.files import file_name
from kerngen.tuning_db import Store


@pytest.fixture
def kerngen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kerngen:
    (tmp_path / "here").mkdir()
    made = Kerngen(tmp_path, monkeypatch, capsys)
    monkeypatch.chdir(tmp_path / "here")
    return made


def fill(path: Path, kernel: str, board: str) -> None:
    """A database with one winner of such a kernel on such a board; its digests are as they should be. Some names are
    refused as they are read, and then there is no winner.
    """
    device = replace(H200, name=board)
    with Store.open(path) as store:
        build = store.add_build(make_cubin(), kernel, source_of(0), {"block_n": 0}, STATIC, options=OPTIONS)
        key = replace(key_of(), kernel=kernel)
        store.add_measurement(measured(build, 0, 10.0, problem=key, device=device))
        store.recompute_winners(kernel, key.static_key, Target.of(device))


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


# ---- what is printed


EVIL = "\x1b[2J\x1b]0;owned\a\0\x7f\x9b31m\u202e\ud800"


def plain(*texts: str) -> bool:
    return not any(c in text for text in texts for c in "\x1b\a\0\x7f\x9b\u202e\ud800\r")


def test_an_error_is_printable_and_its_lines_end() -> None:
    e = KerngenError(f"the name {EVIL}\nthe next line\ttab " + "x" * 10_000, hint=f"hint {EVIL}")
    assert plain(str(e))
    assert str(e).startswith(
        r"the name \x1b[2J\x1b]0;owned\x07\x00\x7f\x9b31m\u202e\ud800" + "\nthe next line\ttab xxx"
    )
    assert max(map(len, str(e).splitlines())) < 2100
    assert printable_name("a\nb" + "c" * 5000).startswith(r"a\nbccc")
    assert printable_name("a" * 5000).endswith("aaa… (5,000 characters)")
    assert (printable("größe 𝛼 ✓\n"), printable_name("größe 𝛼 ✓")) == ("größe 𝛼 ✓\n", "größe 𝛼 ✓")
    assert all(map(is_printable_name, ("x", "größe", "a b")))
    assert not any(map(is_printable_name, ("", "x" * 201, "a\nb", "a\tb", EVIL, None, 3)))


def test_a_log_line_is_printable_in_every_process(kerngen: Kerngen) -> None:
    code = "import logging, sys; from kerngen.system.processes import Processes; from hostile_log import warn\n"
    code += "with Processes(1) as p: p.submit(warn).result()\n"
    Path("hostile_log.py").write_text(f"import logging\ndef warn(): logging.getLogger('x').warning('%s', {EVIL!a})\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60,
                          env=os.environ | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}."})  # fmt: skip
    assert done.stderr.startswith(rb"\x1b[2J")
    assert plain(done.stderr.decode("latin-1"))


def test_tables_and_lines_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(f"title {EVIL}", f"column {EVIL}", "second")
    table.add_row(EVIL, "two\nlines")
    console = new_console()
    console.print(table)
    console.print(f"a line {EVIL}", style="bold")
    say(f"said {EVIL}")
    say(f"said {EVIL}", err=True)
    echo(f"echoed {EVIL}")
    out, err = capsys.readouterr()
    assert plain(out, err)
    assert out.count("owned") == 6
    assert "two lines" in out


def test_a_model_folder_writes_nothing_to_the_terminal(kerngen: Kerngen) -> None:
    """What its files call tensors, shards, formats and fields."""
    tiny = ROOT / "examples" / "tiny" / "gemma-4-tiny"
    config = json.loads((tiny / "config.json").read_text())
    hostile: dict[str, tuple[str, Any]] = {
        "index": ("model.safetensors.index.json", {"weight_map": {EVIL: EVIL}}),
        "shard": ("model.safetensors.index.json", {"weight_map": {"lm_head.weight": EVIL}}),
        "type": ("config.json", config | {"model_type": EVIL + "x" * 10_000}),
        "field": ("config.json", config | {"text_config": {"hidden_size": EVIL, "model_type": EVIL}}),
        "format": ("config.json", config | {"quantization_config": {"quant_method": EVIL + "y" * 10_000}}),
    }
    for name, (file, content) in hostile.items():
        folder = Path(name)
        folder.mkdir()
        for path in tiny.iterdir():
            (folder / path.name).symlink_to(path)
        (folder / file).unlink(missing_ok=True)
        (folder / file).write_text(json.dumps(content))
        code, out, err = kerngen("run", name, "--prompt", "hi", "--backend", "torch", "--device", "cpu")
        assert code in (1, 2), name
        assert out == ""
        assert plain(err), name
        assert len(err) < 3000, name
