"""Seams are values: what several functions hand on together has a name, so that no list of arguments grows long."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = 10  # parameters, self aside
SEAMS = ("runtime/ops/*.py", "runtime/executors/*.py", "templates/*/op.py", "templates/*.py", "kerngen/ops/*.py")


def long_ones(source: str) -> Iterator[tuple[str, int]]:
    """Functions of more than MOST parameters, with how many they have."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(a.arg not in ("self", "cls") for a in given)
            if count > MOST:
                yield getattr(node, "name", "lambda"), count


@pytest.mark.parametrize("pattern", SEAMS)
def test_no_function_at_a_seam_has_many_parameters(pattern: str) -> None:
    files = sorted(ROOT.glob(pattern))
    assert files, f"no file is called {pattern}"
    found = {str(f.relative_to(ROOT)): long for f in files if (long := dict(long_ones(f.read_text())))}
    assert not found, f"more than {MOST} parameters: hand a value on (templates/values.py)"


def test_parameters_are_counted_wherever_they_stand() -> None:
    many = ", ".join(f"a{i}" for i in range(MOST - 1))
    assert not list(long_ones(f"def f({many}, *, b): ...\nclass C:\n    def m(self, {many}, b): ..."))
    assert list(long_ones(f"def f(x, /, {many}, *, b): ...")) == [("f", MOST + 1)]
    assert list(long_ones(f"class C:\n    async def m(self, {many}, b, c=1): ...")) == [("m", MOST + 1)]
