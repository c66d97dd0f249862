"""Tiny kernels in a root of their own, for tests: toy_kernels/scale compiles in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kerngen.templates import TEMPLATES_VARIABLE, find_kernel
from kerngen.templates.kernel import Kernel

TOYS = Path(__file__).parent / "toy_kernels"


@contextmanager
def toy_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """Within it, `scale` is a kernel beside the others. Yields it."""
    with monkeypatch.context() as m:
        m.setenv(TEMPLATES_VARIABLE, str(TOYS))
        yield find_kernel("scale")
