"""The kernels: one folder each. Adding a folder adds a kernel; deleting it removes it everywhere."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import cast

from kerngen.errors import UnknownName
from kerngen.templates.kernel import ROOT, Case, Cost, Kernel, Launch, Spec, Tolerance

__all__ = ["Case", "Cost", "Kernel", "Launch", "Tolerance", "find_kernel", "kernel_names"]


@cache
def kernel_names() -> tuple[str, ...]:
    """Every folder here that has a spec.py, sorted."""
    return tuple(sorted(p.parent.name for p in ROOT.glob("*/spec.py")))


@cache
def find_kernel(name: str) -> Kernel:
    """The kernel called `name`. Raises UnknownName, listing the known ones."""
    if name not in kernel_names():
        raise UnknownName("kernel", name, kernel_names())
    return Kernel(name, cast(Spec, import_module(f"kerngen.templates.{name}.spec")))
