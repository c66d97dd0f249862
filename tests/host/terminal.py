"""`kerngen` on a terminal: a pseudo-terminal that tests type into and read from."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO

_SEQUENCE = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")
LIMIT_S = 60.0  # for anything to happen; only a failure takes so long


class Terminal:
    """Runs `kerngen ARGS` with its streams on a terminal of its own, in the environment of this process.

    stdout: a file in place of the terminal. program: what takes ARGS in place of kerngen. `shown` is all that the
    terminal has shown, lines ended by a newline alone.
    """

    def __init__(
        self, *args: str, stdout: IO[bytes] | None = None, program: Sequence[str] = (sys.executable, "-m", "kerngen")
    ) -> None:
        self.shown = ""
        self._seen = 0
        self._ours, theirs = pty.openpty()

        def take_over() -> None:  # Ctrl-C reaches who has the terminal
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
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

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def ctrl_c(self) -> None:
        """Where a line is typed, Python's readline misses a signal between its last character and its next wait."""
        time.sleep(0.2)
        self.type("\x03")

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
        while not _SEQUENCE.sub("", self.shown[self._seen :]).strip():  # readline's at the end of a line is no answer
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
