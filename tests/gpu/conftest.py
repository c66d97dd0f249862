"""Tests here need a CUDA device; without one they skip and say so."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def _why_not() -> str | None:
    try:
        import torch
    except ImportError as e:
        return f"torch cannot be imported: {e}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    try:
        import cupy  # noqa: F401
        from cuda.bindings import driver  # noqa: F401
    except ImportError as e:
        return f"{e}; pip install 'kerngen[cuda12]'"
    return None


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
