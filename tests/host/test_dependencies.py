"""pyproject.toml declares what is imported, and nothing else."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from command import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

IMPORTED_AS = {"pyelftools": "elftools"}
BY_EXTRAS = {"cupy", "cupy_backends", "cuda", "procrastinate", "psycopg", "pynvml"}
BY_EXTRAS |= {"fastapi", "h11", "llguidance", "prometheus_client", "pydantic", "pydantic_core", "starlette", "uvicorn"}
BY_EXTRAS |= {"opentelemetry"}  # of otel
BY_EXTRAS |= {"vllm"}
BY_EXTRAS |= {"PIL", "soundfile", "soxr", "av"}  # of media and video
TREES = ("kerngen", "templates", "tuning_db", "runtime")


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_the_constraints_name_all_that_is_installed_with_kerngen() -> None:
    """What dependencies of dependencies bring along, too; but CUDA's libraries, which come in torch's own versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    todo = [*project["dependencies"], *(d for more in project["optional-dependencies"].values() for d in more)]
    seen, missing = set[tuple[str, str]](), set[str]()
    while todo:
        wanted = Requirement(todo.pop())
        name = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                requires = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue  # of an extra, or a system, that is not this one's
            if name not in pinned | {"kerngen"}:  # which one extra names for another
                missing.add(name)
            needs = [Requirement(r) for r in requires]
            todo += [str(r) for r in needs if r.marker is None or r.marker.evaluate({"extra": extra})]
    assert {n for n in missing if not n.startswith(("nvidia-", "cuda-"))} == set()


def test_what_is_declared_is_imported_and_the_other_way_round() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[<>=\[ ]", d)[0] for d in project["dependencies"]]
    declared = {IMPORTED_AS.get(n, n) for n in names}
    files = {p.resolve() for tree in TREES for p in (ROOT / tree).rglob("*.py")}
    imported = set().union(*map(_imports, files)) - set(sys.stdlib_module_names) - {"kerngen"}
    assert declared == imported - BY_EXTRAS
