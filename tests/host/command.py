"""`kerngen` as a user meets it, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from once import keep, kept, once
from sheets import measured_sheets

from kerngen.cli import main
from kerngen.tuning_db import shipped
from kerngen.tuning_db.read import places
from kerngen.tuning_db.read.boards import Board

ROOT = Path(__file__).resolve().parents[2]
_BOARDS = ".kgdb"  # what is made of the sheets of a board ends so: seconds of work, and its name says of which sheets
_make = shipped._make


def _make_once(board: Board, key: str, path: Path) -> None:
    """In place of kerngen's own, which it calls for the first test: the same file, where the test has its cache."""
    made = once(path.name, lambda part: _make(board, key, part))
    path.unlink(missing_ok=True)  # that was damaged
    path.hardlink_to(made)


@contextmanager
def lent_boards(cache: Path) -> Iterator[None]:
    """Within it processes with this cache find what earlier ones made of a board's sheets (10 s of work); what they
    make is there for later ones.
    """
    boards = cache / "prebuilt"
    for path in kept(_BOARDS):
        boards.mkdir(parents=True, exist_ok=True)
        if not (boards / path.name).exists():
            (boards / path.name).hardlink_to(path)
    yield
    for path in boards.glob(f"*{_BOARDS}"):
        keep(path)


class Kerngen:
    """Runs `kerngen` with a cache, a database and a home of its own, all in `folder`; installed with few sheets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys
        for name in [n for n in os.environ if n.startswith("KERNGEN_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("KERNGEN_CACHE_DIR", str(folder / "cache"))
        monkeypatch.setenv("KERNGEN_DB", str(folder / "tuning.db"))
        monkeypatch.setenv("HOME", str(folder))
        for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.setattr(places, "PREBUILT", measured_sheets(folder / "prebuilt"))
        monkeypatch.setattr(shipped, "_make", _make_once)
        monkeypatch.chdir(folder)

    def __call__(self, *args: str) -> tuple[int, str, str]:
        """In this process, through main(): exit code, stdout, stderr."""
        self._monkeypatch.setattr(sys, "argv", ["kerngen", *args])
        self._capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as e:
            code = int(e.code or 0)
        out, err = self._capsys.readouterr()
        return code, out, err

    def ok(self, *args: str) -> str:
        """The same, which must succeed: stdout."""
        code, out, err = self(*args)
        assert code == 0, err
        return out

    def run(self, *args: str, lend: bool = True, **how: object) -> tuple[int, str, str]:
        """In a process of its own, with all sheets; a board's that an earlier one made a file of are not read again.

        lend: put these files into its cache.
        """
        cache = self.folder / "cache"
        with lent_boards(cache) if lend and os.environ.get("KERNGEN_CACHE_DIR") == str(cache) else nullcontext():
            done = subprocess.run([sys.executable, "-m", "kerngen", *args], stdin=subprocess.DEVNULL, text=True,
                                  stderr=subprocess.PIPE, timeout=120, check=False,
                                  **{"stdout": subprocess.PIPE, **how})  # type: ignore[call-overload]  # fmt: skip
        return done.returncode, done.stdout or "", done.stderr

    def files(self) -> list[str]:
        """Every file in its folder but what lies whole in the compile cache."""
        paths = (p.relative_to(self.folder) for p in self.folder.rglob("*") if p.is_file())
        ours = (p for p in paths if p.parts[0] != "prebuilt" and "prebuilt" not in p.parts[1:2])
        return sorted(str(p) for p in ours if p.parts[0] != "cache" or p.name.startswith("."))
