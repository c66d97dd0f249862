"""Fixtures of several files' tests, and what they can be asked for."""

from __future__ import annotations

import pytest
from postgres import postgresql_server, postgresql_url

__all__ = ["postgresql_server", "postgresql_url"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true",
                     help="compile every case of test_kernel_folders, not only those that tell")  # fmt: skip
