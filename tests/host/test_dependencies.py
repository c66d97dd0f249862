"""pyproject.toml declares what is imported, and nothing else."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

from command import ROOT

IMPORTED_AS = {"pyelftools": "elftools"}
BY_EXTRAS = {"cupy", "cupy_backends", "cuda", "procrastinate", "psycopg", "pynvml"}
BY_EXTRAS |= {"opentelemetry"}  # of otel
BY_EXTRAS |= {"fastapi", "llguidance", "prometheus_client", "pydantic", "starlette", "uvicorn"}  # of serve
TREES = ("kerngen", "templates", "tuning_db", "runtime")


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_what_is_declared_is_imported_and_the_other_way_round() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[<>=\[ ]", d)[0] for d in project["dependencies"]]
    declared = {IMPORTED_AS.get(n, n) for n in names}
    files = {p.resolve() for tree in TREES for p in (ROOT / tree).rglob("*.py")}
    imported = set().union(*map(_imports, files)) - set(sys.stdlib_module_names) - {"kerngen"}
    assert declared == imported - BY_EXTRAS
