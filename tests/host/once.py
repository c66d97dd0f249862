"""What takes seconds to make and is the same for all tests: made once a session, by the process that needs it first."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


class _Session:
    folder: Path  # of all processes of a session; conftest.py says which


def settle(factory: pytest.TempPathFactory) -> None:
    """From here on `once` knows where it keeps things: one folder for all workers of pytest-xdist."""
    base = factory.getbasetemp()
    _Session.folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once"
    _Session.folder.mkdir(exist_ok=True)


def once(name: str, make: Callable[[Path], object]) -> Path:
    """The file that `make` writes, each name in a folder of its own. Others read it: link or copy it, never write."""
    path = _Session.folder / name / name
    path.parent.mkdir(exist_ok=True)
    with open(path.with_name("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(part := path.with_name(f"part-{name}"))
            part.rename(path)
    return path


def keep(path: Path) -> None:
    """Keep what a test's own process made."""
    place = _Session.folder / "kept" / path.name
    place.parent.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        place.hardlink_to(path)


def kept(suffix: str) -> list[Path]:
    """What processes of tests made by now."""
    return list((_Session.folder / "kept").glob(f"*{suffix}"))
