"""Fixtures of several files' tests, and what they can be asked for."""

from __future__ import annotations

from collections.abc import Iterator

import fresh
import pytest
from once import settle
from postgres import postgresql_server, postgresql_url

from kerngen.tuning_db.store import migrate

__all__ = ["postgresql_server", "postgresql_url"]


@pytest.fixture(scope="session", autouse=True)
def _once(tmp_path_factory: pytest.TempPathFactory) -> None:
    settle(tmp_path_factory)


@pytest.fixture(scope="session", autouse=True)
def _fresh() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate, "upgrade", fresh.upgrade)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true",
                     help="compile every case of test_kernel_folders, not only those that tell")  # fmt: skip


# What takes longest begins first, with all of its file, so that no worker waits long for another at the end; the rest
# follows as it is. Seconds are of a processor's time, on two busy cores.
FIRST = (
    "test_kernel_folders.py",  # 180 s: NVRTC, some 470 distinct sources
    "test_warpgroup_bodies.py",  # 20 s: NVRTC, 16 large ones
    "test_cli_process.py",  # 50 s: processes, each of which imports torch
    "test_tune_cli.py",  # 35 s: 12 for every problem of the 31B on a V100
    "test_examples.py",  # 26 s
    "test_soak.py",  # 27 s
    "test_engine_batches.py",  # 30 s
    "test_choosing.py",  # 24 s
    "test_serve_page.py",  # 28 s, where there is a browser
    "test_library.py",  # 24 s: mypy over the wheel and torch
    "test_serve_process.py",  # 9 s, and waits: servers of the tiny checkpoint
    "test_cluster.py",  # 19 s, and waits: processes for each other
    "test_docs.py",  # 21 s
    "test_tune.py",  # 19 s
    "test_executors.py",  # 19 s
    "test_draft_weights.py",  # 18 s
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: turn for turn, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(FIRST)))
