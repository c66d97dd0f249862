"""How a process ends in which a library waits for what never comes: without that library's clean-up."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from threading import Event
from typing import NoReturn

_at_once = Event()


def leave_at_once() -> None:
    """From now on the process ends without libraries' clean-up, since one of them waits for ever, or would: by `leave`,
    or with the exit code that it has as it ends otherwise.
    """
    if not _at_once.is_set():
        _at_once.set()
        libc = ctypes.CDLL(None)
        # Run before what was registered earlier: destructors of libraries, of which a thread that is left may be in the
        # midst. No handler of Python's is told the exit code. Of glibc: elsewhere the clean-up stays as it is.
        with suppress(AttributeError):
            libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def leave(code: int) -> NoReturn:
    """End the process with `code`, what was written to its streams written."""
    if _at_once.is_set():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)
