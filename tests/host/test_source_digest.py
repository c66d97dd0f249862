"""What a closure covers: every file that decides what a kernel renders, and no place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from kerngen.compiler import source_digest
from kerngen.compiler.source_digest import source_digest_of
from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.kernel import Kernel


def kernel_in(folder: Path) -> Kernel:
    kernel = Kernel(folder.name, ModuleType("spec"))
    kernel.__dict__["folder"] = folder  # as `folder` finds it once it is installed
    return kernel


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with its own common/, and a kernel that takes a template and a module from two other folders."""
    files = {
        "common/twice.cuh": "twice",
        "scale/kernel.cu.jinja": '{% include "plan.cuh.jinja" %}\n{%- import "other/macros.jinja" as m %}',
        "scale/plan.cuh.jinja": "plan",
        "scale/spec.py": "from kerngen.templates import (\n    third,\n)\nN = 1",
        "scale/tables/t.inc": "1, 2, 3",
        "other/macros.jinja": "{% macro a() %}{% endmacro %}",
        "third/spec.py": "import kerngen.templates.fourth.spec",
        "fourth/spec.py": "from ..fifth import spec\nfrom .. import sixth",
        "fifth/spec.py": "M = 2",
        "sixth/__init__.py": "M = 3",
        "stranger/spec.py": "nobody's",
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    ["common/twice.cuh", "scale/kernel.cu.jinja", "scale/plan.cuh.jinja", "scale/spec.py", "scale/tables/t.inc",
     "other/macros.jinja", "third/spec.py", "fourth/spec.py", "fifth/spec.py", "sixth/__init__.py"],
)  # fmt: skip
def test_a_change_of_anything_that_is_taken_changes_it(root: Path, name: str) -> None:
    before = source_digest_of(kernel_in(root / "scale"))
    path = root / name
    same = path.read_bytes()
    path.write_bytes(same + b"+")
    after = source_digest_of(kernel_in(root / "scale"))
    assert after != before
    path.write_bytes(same)
    assert source_digest_of(kernel_in(root / "scale")) == before
    path.rename(path.with_name("renamed"))
    assert source_digest_of(kernel_in(root / "scale")) not in (before, after)


def test_what_nobody_takes_and_where_it_lies_are_no_part_of_it(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = source_digest_of(kernel_in(root / "scale"))
    (root / "stranger" / "spec.py").write_text("changed")
    (root / "scale" / "__pycache__").mkdir()
    (root / "scale" / "__pycache__" / "spec.pyc").touch()
    os.utime(root / "scale" / "spec.py", (1, 1))
    assert source_digest_of(kernel_in(root / "scale")) == before
    moved = tmp_path_factory.mktemp("elsewhere") / "root"
    shutil.copytree(root, moved)
    assert source_digest_of(kernel_in(moved / "scale")) == before


def test_where_an_expression_names_the_template_any_folder_counts(root: Path) -> None:
    (root / "scale" / "kernel.cu.jinja").write_text("{% include k.which %}")
    before = source_digest_of(kernel_in(root / "scale"))
    (root / "stranger" / "spec.py").write_text("changed")
    assert source_digest_of(kernel_in(root / "scale")) != before


def test_a_module_of_the_package_counts_where_it_is_taken(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_digest, "ROOT", root)
    (root / "shapes.py").write_text("N = 1")
    before = source_digest_of(kernel_in(root / "scale"))
    (root / "scale" / "spec.py").write_text("from kerngen.templates.shapes import N")
    taken = source_digest_of(kernel_in(root / "scale"))
    (root / "shapes.py").write_text("N = 2")
    assert len({before, taken, source_digest_of(kernel_in(root / "scale"))}) == 3


@pytest.mark.parametrize("index", range(len(source_digest._CODE)), ids=lambda i: source_digest._CODE[i].name)
def test_the_code_that_renders_is_part_of_it(
    root: Path, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = list(source_digest._CODE)
    (tmp_path / "code").mkdir()
    code[index] = Path(shutil.copy(code[index], tmp_path / "code"))
    monkeypatch.setattr(source_digest, "_CODE", tuple(code))
    before = source_digest_of(kernel_in(root / "scale"))
    assert source_digest_of(kernel_in(root / "scale")) == before
    code[index].write_text(code[index].read_text() + "\n")
    assert source_digest_of(kernel_in(root / "scale")) != before


def test_every_kernel_has_its_own() -> None:
    found = {name: source_digest_of(find_kernel(name)) for name in kernel_names()}
    assert len(set(found.values())) == len(found) > 10
