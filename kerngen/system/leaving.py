"""How a process ends in which a library waits for what never comes: without that library's clean-up."""

from __future__ import annotations

import os
import sys
from threading import Event
from typing import NoReturn

_at_once = Event()


def leave_at_once() -> None:
    """From now on `leave` does not wait for libraries: one of them waits for ever, or would."""
    _at_once.set()


def leave(code: int) -> NoReturn:
    """End the process with `code`, what was written to its streams written."""
    if _at_once.is_set():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)
