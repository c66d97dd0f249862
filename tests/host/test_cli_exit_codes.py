"""How commands end: 0 done, 1 failed, 2 misused, 130 by Ctrl-C, whatever they print."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import ROOT, Kerngen

from kerngen.arch import DEVICES
from kerngen.errors import CompileError


@pytest.fixture
def broken_tree(tmp_path: Path) -> Path:
    """A copy of kerngen whose kernel `embed` has a syntax error."""
    tree = tmp_path / "tree"
    for name in ("kerngen", "templates", "tuning_db", "runtime"):
        ignored = shutil.ignore_patterns("prebuilt")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    body = tree / "templates" / "embed" / "kernel.cu.jinja"
    body.write_text(body.read_text() + "\nthis is not CUDA\n")
    return tree


def test_a_kernel_that_does_not_compile_fails_the_command(kerngen: Kerngen, broken_tree: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(broken_tree)}
    compiling = ("compile", "--arch", "sm70", "--cases", "--kernel", "embed", "--jobs", "1")
    code, out, err = kerngen.run(*compiling, env=environment)
    assert code == 1, err
    assert out.count("failed: embed on sm70 (") == 1
    assert re.search(r"templates/embed/kernel.cu.jinja:\d+: error: ", out)
    assert "Traceback" not in err
    bundling = ("compile", "--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "embed", "-o", "out.kgdb")
    code, out, _ = kerngen.run(*bundling, "--json", env=environment)
    assert code == 1
    assert json.loads(out)["failures"]
    assert not (kerngen.folder / "out.kgdb").exists(), "it would lack what its model runs"
    tuning = ("tune", "--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "embed", "--trials", "1",
              "--jobs", "1")  # fmt: skip
    code, out, err = kerngen.run(*tuning, env=environment)
    assert code == 1, err
    assert "0 of 14 problems have a winner" in out
    assert re.search(r"^no winner: embed \(14\): ", out, re.MULTILINE), "it is said without -v"


def test_doctor_fails_where_nothing_can_be_compiled(kerngen: Kerngen) -> None:
    (kerngen.folder / "first").mkdir()
    (kerngen.folder / "first" / "cupy_backends.py").write_text("raise ImportError('no CuPy here')\n")
    hidden = f"{kerngen.folder / 'first'}{os.pathsep}{os.environ['PYTHONPATH']}"
    code, out, err = kerngen.run("doctor", env=os.environ | {"PYTHONPATH": hidden})
    assert code == 1, err
    assert "cannot load NVRTC through CuPy: no CuPy here" in out


@pytest.mark.parametrize("right", [True, False])
def test_a_kernel_that_computes_wrongly_fails_its_check(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    """The GPU is pretended: what it would answer is given."""
    result = SimpleNamespace(ok=right, message="", error_abs=0.0 if right else 0.5, error_rel=0.0)
    monkeypatch.setattr("kerngen.runtime.launcher.probe_device", lambda: replace(DEVICES["H200"], source="probed"))
    monkeypatch.setattr("kerngen.timing.measure.check_case", lambda *_, **__: result)
    code, out, err = kerngen("kernel", "check", "embed")
    assert code == (0 if right else 1), err
    assert (" 0 wrong" in out) == right


def test_a_kernel_that_does_not_compile_fails_its_check(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of the first case is not said again of each."""

    def fail(*_: object, **__: object) -> None:
        raise CompileError("embed/kernel.cu.jinja:7: error: expected a declaration")

    monkeypatch.setattr("kerngen.runtime.launcher.probe_device", lambda: replace(DEVICES["H200"], source="probed"))
    monkeypatch.setattr("kerngen.timing.measure.check_case", fail)
    code, out, err = kerngen("kernel", "check", "embed")
    assert code == 1, err
    first, *others, last = out.splitlines()
    assert first.endswith("embed/kernel.cu.jinja:7: error: expected a declaration")
    assert len(others) > 3
    assert all(line.startswith("failed ") and line.endswith(" as above") for line in others)
    assert last == f"0 right, {1 + len(others)} wrong, 0 unsupported on sm90"


@pytest.mark.parametrize(("args", "code"), [
    (("--help",), 0), (("--version",), 0), (("db", "ls", "--help"), 0), (("arch", "ls"), 0), ((), 2),
    (("db", "x"), 2),
], ids=lambda v: " ".join(v) if isinstance(v, tuple) else "")  # fmt: skip
def test_the_code_of_what_does_nothing(kerngen: Kerngen, args: tuple[str, ...], code: int) -> None:
    assert kerngen.run(*args)[0] == code
    assert kerngen(*args)[0] == code
