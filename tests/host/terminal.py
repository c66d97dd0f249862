"""`kerngen` on a terminal: a pseudo-terminal that tests type into and read from."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any

from rich.cells import cell_len

_SHOWN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|([^\x1b])", re.DOTALL)
_SEQUENCE = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")
LIMIT_S = 60.0  # for anything to happen; only a failure takes so long


def seen(shown: str, columns: int) -> list[str]:
    """The lines of a terminal that obeys what moves its cursor and what erases, and heeds no colour."""
    rows: list[list[str]] = [[]]
    row = column = 0
    for found in _SHOWN.finditer(shown):
        counts, command, char = found.groups()
        count = int(counts) if counts and counts.isdigit() else 0
        if char == "\r":
            column = 0
        elif char == "\n":
            row, column = row + 1, 0
        elif char == "\b":
            column = max(0, column - 1)
        elif char is not None:
            cells = cell_len(char)
            if column + cells > columns:
                row, column = row + 1, 0
            rows.extend([] for _ in range(row + 1 - len(rows)))
            line = rows[row]
            line.extend(" " * (column - len(line)))
            if cells:
                line[column : column + cells] = [char, *[""] * (cells - 1)]
            else:
                line[column - 1] += char
            column += cells
        elif command in "AB":
            row = max(0, row - max(count, 1)) if command == "A" else row + max(count, 1)
        elif command in "CD":
            column = max(0, column + max(count, 1) * (1 if command == "C" else -1))
        elif command == "J" and not count:
            rows[row:] = [rows[row][:column]] if row < len(rows) else []
        elif command == "K" and row < len(rows):
            rows[row][column if not count else 0 :] = []
        rows.extend([] for _ in range(row + 1 - len(rows)))
    return ["".join(line).rstrip() for line in rows]


class Terminal:
    """Runs `kerngen ARGS` with its streams on a terminal of its own, in the environment of this process.

    stdout: a file in place of the terminal. program: what takes ARGS in place of kerngen. columns: its width. `shown`
    is all that was written to the terminal, lines ended by a newline alone; `lines` is what can be seen of it.
    """

    def __init__(
        self, *args: str, stdout: IO[bytes] | None = None, program: Sequence[str] = (sys.executable, "-m", "kerngen"),
        columns: int = 80,
    ) -> None:  # fmt: skip
        self.shown = ""
        self.columns = columns
        self._seen = 0
        self._ours, theirs = pty.openpty()
        self.resize(columns)

        def take_over() -> None:  # Ctrl-C reaches who has the terminal
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        environment = os.environ | {"TERM": "xterm", "COLUMNS": "", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen([*program, *args], stdin=theirs, stderr=theirs, stdout=stdout or theirs,
                                         env=environment, start_new_session=True, preexec_fn=take_over)  # fmt: skip
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

    @property
    def settings(self) -> list[Any]:
        """What termios says of it: whether it echoes, whether it edits lines."""
        return termios.tcgetattr(self._ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def resize(self, columns: int) -> None:
        self.columns = columns
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    @property
    def lines(self) -> list[str]:
        """What can be seen, without blanks at the end of a line, in a window that is as high as need be."""
        return seen(self.shown, self.columns)

    def until_last(self, line: str) -> list[str]:
        """The lines, once this is the last of them."""
        deadline = time.monotonic() + LIMIT_S
        while (lines := self.lines)[-1] != line:
            assert time.monotonic() < deadline, f"{line!r} never came last; there is {lines[-5:]!r}"
            assert self._read(), f"it ended before {line!r}; there is {lines[-5:]!r}"
        self._seen = len(self.shown)
        return lines

    def until(self, *texts: str) -> str:
        """What was shown since the last call, up to and with the first of `texts` that comes."""
        deadline = time.monotonic() + LIMIT_S
        while not (ends := [at + len(text) for text in texts if (at := self.shown.find(text, self._seen)) >= 0]):
            assert time.monotonic() < deadline, f"{texts!r} never came; since then: {self.shown[self._seen :]!r}"
            assert self._read(), f"it ended before {texts!r}; since then: {self.shown[self._seen :]!r}"
        start, self._seen = self._seen, min(ends)
        return self.shown[start : self._seen]

    def until_more(self) -> None:
        """Wait for anything that can be seen, which stays for the next `until`."""
        deadline = time.monotonic() + LIMIT_S
        while not _SEQUENCE.sub("", self.shown[self._seen :]).strip():  # what moves a cursor is no answer
            assert time.monotonic() < deadline, "nothing more comes"
            assert self._read(), "it ended"

    def end(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + LIMIT_S
        while self._read():
            assert time.monotonic() < deadline, f"it does not end: {self.shown[self._seen :]!r}"
        return self._process.wait(LIMIT_S)

    def _read(self) -> bool:
        """Wait a little for more. False once nobody can write any more."""
        if not select.select([self._ours], [], [], 0.2)[0]:
            return True
        data = b""
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            data = os.read(self._ours, 1 << 16)
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)
