"""A tiny kernel folder in place of the real ones, for tests of the tuner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2

import kerngen.render
import kerngen.templates
import kerngen.templates.kernel
import kerngen.tuning.ledger

ROOT = Path(__file__).parent / "toy_kernels"


@contextmanager
def toy_kernels(monkeypatch: Any) -> Iterator[Any]:
    """Within it, the only kernel is `scale`. Yields it."""
    environment = kerngen.render._environment().overlay(loader=jinja2.FileSystemLoader(ROOT))
    with monkeypatch.context() as m:
        m.setattr(kerngen.templates, "__path__", [*kerngen.templates.__path__, str(ROOT)])
        for module in (kerngen.templates, kerngen.templates.kernel, kerngen.tuning.ledger):
            m.setattr(module, "ROOT", ROOT)
        m.setattr(kerngen.render, "_environment", lambda: environment)
        _forget()
        try:
            yield kerngen.templates.find_kernel("scale")
        finally:
            _forget()


def _forget() -> None:
    kerngen.templates.kernel_names.cache_clear()
    kerngen.templates.find_kernel.cache_clear()
