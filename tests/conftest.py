"""Reports of tests cross a pipe between the processes of pytest-xdist, whatever a test says when it fails."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, dict[str, Any] | None, Any]:
    return sendable((yield))


def sendable(value: Any) -> Any:
    """`value` as execnet sends it: a report that it refuses, for a lone surrogate say, ends the whole session."""
    if value is None or type(value) in (bool, int, float, bytes):
        return value
    if isinstance(value, dict):
        return {sendable(key): sendable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(sendable, value)] if isinstance(value, list) else (*map(sendable, value),)
    return (value if isinstance(value, str) else repr(value)).encode(errors="backslashreplace").decode()
