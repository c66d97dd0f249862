"""Kernels that lie outside of the package, and folders that are not as the contract asks."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from shutil import copytree

import pytest
from toy import TOYS, toy_kernels

from kerngen import templates
from kerngen.arch import Target, find_arch
from kerngen.compiler.compile import compile_cubin
from kerngen.compiler.render import render
from kerngen.errors import TemplateError, UnknownName, UsageError
from kerngen.templates import TEMPLATES_VARIABLE, find_kernel, kernel_names
from kerngen.templates.kernel import describe

SM90 = Target.of(find_arch("sm90"))
Broken = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TEMPLATES_VARIABLE, raising=False)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root of its own with a copy of the toy kernel, named by KERNGEN_TEMPLATES."""
    copytree(TOYS, tmp_path / "kernels")
    monkeypatch.setenv(TEMPLATES_VARIABLE, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def _add(root: Path, name: str, text: str) -> None:
    (root / name).mkdir()
    (root / name / "spec.py").write_text(text)


# -- roots


def test_a_kernel_may_lie_anywhere(root: Path) -> None:
    kernel = find_kernel("scale")
    assert kernel_names() == tuple(sorted({*kernel_names(), "scale"}))
    assert kernel.folder == root / "scale"
    problem = kernel.problem_type(num_tokens=3)
    source = render(kernel, problem, kernel.default_config(problem, SM90), SM90)
    assert set(compile_cubin(source, SM90.arch).entries) == {"scale"}


def test_it_is_gone_with_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with toy_kernels(monkeypatch) as kernel:
        first = kernel.folder
    with pytest.raises(UnknownName, match="scale"):
        find_kernel("scale")
    copytree(TOYS, tmp_path / "other")
    monkeypatch.setenv(TEMPLATES_VARIABLE, str(tmp_path / "other"))
    assert find_kernel("scale").folder == tmp_path / "other" / "scale" != first


def test_a_spawned_process_unpickles_its_problems(root: Path) -> None:
    problem = find_kernel("scale").problem_type(width=64)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(describe, problem).result(60) == "[width=64 num_tokens=1]"


def test_several_roots_and_the_option(tmp_path: Path) -> None:
    copytree(TOYS / "scale", tmp_path / "b" / "second")
    command = [sys.executable, "-m", "kerngen", "--templates", str(TOYS), "--templates", "b", "kernel", "ls"]
    path = f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
                          timeout=60, check=True)  # fmt: skip
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert {"scale", "second", "rmsnorm"} <= set(names)
    assert names == sorted(names)


def test_an_installed_package_announces_its_kernels(tmp_path: Path) -> None:
    copytree(TOYS, tmp_path / "my_kernels")
    (tmp_path / "my_kernels" / "__init__.py").touch()
    info = tmp_path / "my_kernels-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-kernels\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kerngen.templates]\nmine = my_kernels\nlost = not_there_at_all\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    code = "from kerngen.templates import find_kernel as f; print(f('scale').folder); f('rmsnorm').spec"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
                          text=True, timeout=60, check=True)  # fmt: skip
    assert done.stdout.strip() == str(tmp_path / "my_kernels" / "scale")
    assert done.stderr.count("not_there_at_all") == 1


@pytest.mark.parametrize("name", ["rmsnorm", "scale"])
def test_two_folders_of_one_name_are_named(
    root: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copytree(TOYS / "scale", tmp_path / "more" / name)
    monkeypatch.setenv(TEMPLATES_VARIABLE, os.pathsep.join([str(root), str(tmp_path / "more")]))
    with pytest.raises(UsageError, match=f"kernel {name}: .*{name} and {tmp_path / 'more' / name}"):
        kernel_names()


@pytest.mark.parametrize("path", ["kernel/spec.py", "common/spec.py", "common/__init__.py"])
def test_names_of_the_package_are_refused(root: Path, path: str) -> None:
    (root / path).parent.mkdir()
    (root / path).touch()
    with pytest.raises(UsageError, match=f"{path}: {path.split('/')[0]} "):
        find_kernel("scale")


def test_a_root_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TEMPLATES_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"nowhere .*folder"):
        kernel_names()


def test_a_root_may_share_headers(root: Path) -> None:
    (root / "common").mkdir()
    (root / "common" / "twice.cuh").write_text("#pragma once\n__device__ float twice(float x) { return x * FACTOR; }\n")
    template = root / "scale" / "kernel.cu.jinja"
    _edit(template, "constexpr int", '#include "common/ptx/types.cuh"\n#include "common/twice.cuh"\nconstexpr int')
    kernel = find_kernel("scale")
    problem = kernel.problem_type()
    before = kernel.folder_digest
    source = render(kernel, problem, kernel.default_config(problem, SM90), SM90)
    assert "// ---- common/twice.cuh" in source
    assert "DEVICE" in source
    with pytest.raises(Exception, match="FACTOR"):
        compile_cubin(source, SM90.arch)
    (root / "common" / "twice.cuh").write_text("#define FACTOR 2\n")
    vars(kernel).pop("folder_digest")
    assert kernel.folder_digest != before


def test_a_shared_header_that_is_ours_is_named(root: Path) -> None:
    (root / "common" / "ptx").mkdir(parents=True)
    (root / "common" / "ptx" / "types.cuh").touch()
    with pytest.raises(UsageError, match=rf"shared file common/ptx/types.cuh: .*templates.* and {root}"):
        kernel_names()


# -- folders that are not as the contract asks


WRONG = {
    "syntax": (("def cost(", "def cost(("), r"spec.py:\d+: SyntaxError: "),
    "import": (("from dataclasses", "import lost\nfrom dataclasses"), r"spec.py:5: ModuleNotFoundError: .*'lost'"),
    "no cost": (("def cost(", "def price("), r"spec.py: lacks cost; a spec.py has Problem, "),
    "arity": (("def cost(problem: Problem)", "def cost()"), r"spec.py:\d+: cost is called with 1 argument, "),
    "no default": (("threads: int = 128", "threads: int"), r"spec.py:22: threads of Config must have defaults"),
    "space": (('"vectors": (1', '"vctors": (1'), r"spec.py:30: kernel.cu.jinja: its space has vctors; Config has "),
    "one value": (("(1, 2, 4)", "1"), r"spec.py:30: .*candidates of vectors are 1, not"),
    "bodies": (("jinja\", ARGS, SPACE),)", "jinja\", ARGS, SPACE))"), r"spec.py:30: BODIES is not a tuple"),
    "template": (('Body("kernel.cu', 'Body("kernl.cu'), r"spec.py:30: template kernl.cu.jinja: no such file"),
    "argument": (('"x", "ptr"', '"x", "pointer"'), r"spec.py:30: .*'pointer'.* is no Arg of kind ptr, "),
    "output": (('OUTPUTS = ("out"', 'OUTPUTS = ("y"'), r"spec.py:30: .*OUTPUTS has y, which is no ptr or ptrs of"),
    "runtime": (("= (\"num_tokens\",)", "= (\"tokens\",)"), r"spec.py:13: Problem.RUNTIME is \('tokens',\), not"),
    "dynamic": (('str] = "num_tokens"', 'str] = "width"'), r"spec.py:13: Problem.DYNAMIC is 'width': one of RUNTIME"),
    "tuned as default": (
        ('str] = "num_tokens"', 'str] = "num_tokens"\n    TUNED_AS_DEFAULT: ClassVar = ("num_tokens",)'),
        r"spec.py:13: Problem.TUNED_AS_DEFAULT is \('num_tokens',\), not a tuple of compiled-in fields that have ",
    ),
    "only": (('"x", "ptr"', '"x", "ptr", only="num_tokens"'), r"spec.py:30: .*num_tokens of an argument's `only`"),
    "fused": (("def cost(", "def replaces(p):\n    return ()\n\n\ndef cost("), r":\d+: Config has no field fused"),
    "thawed": (("frozen=True, ", ""), r"spec.py:13: Problem is not frozen"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "why"), WRONG.values(), ids=WRONG)
def test_a_wrong_folder_is_left_out_with_its_line(
    root: Path, edit: tuple[str, str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "scale").rename(root / "wrong")
    _edit(root / "wrong" / "spec.py", *edit)
    copytree(TOYS / "scale", root / "scale")
    with caplog.at_level(logging.WARNING):
        assert "scale" in kernel_names()
        assert "wrong" not in kernel_names()
    (warning,) = [r.getMessage() for r in caplog.records]
    with pytest.raises(TemplateError, match=why) as e:
        find_kernel("wrong")
    assert str(root / "wrong") in e.value.message
    assert warning == f"{e.value.message}; left out"


def test_a_part_that_does_not_load_names_its_line(root: Path) -> None:
    (root / "scale" / "cases.py").write_text("CASES = ()\nraise ValueError('no cases\\nat all')\n")
    with pytest.raises(TemplateError, match=r"kernel scale: .*scale/cases.py:2: ValueError: no cases$"):
        _ = find_kernel("scale").cases
    with pytest.raises(TemplateError, match=r"kernel scale has no .*scale/bench.py"):
        _ = find_kernel("scale").bench


def test_a_name_that_cannot_be_imported_is_named(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    _add(root, "my-kernel", "")
    _add(root, ".hidden", "")
    kernel_names()
    (record,) = caplog.records
    assert "'my-kernel' is no Python name" in record.getMessage()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    templates.rescan()
