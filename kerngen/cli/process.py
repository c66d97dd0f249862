"""The process that a command runs in: its standard streams."""

from __future__ import annotations

import io
import os
import sys

from kerngen.errors import KerngenError


def settle_streams() -> None:
    """Make the standard streams fit to be used, whatever the caller did to them. Raises KerngenError without stdout.

    One that was closed is opened on the null device: otherwise the next file that is opened takes its number, a
    database perhaps, and what is printed ends up there. What a stream's encoding lacks is written as an escape.
    """
    output_is_closed = sys.stdout is None
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # takes the lowest number that is free
        pass
    os.close(fd)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if output_is_closed:
        sys.stdout = os.fdopen(1, "w", closefd=False)
        raise KerngenError("standard output is closed, and results go there", hint="to throw them away: >/dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
