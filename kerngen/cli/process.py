"""The process that a command runs in: its streams, its home, its threads, and the signals that end it."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from kerngen.errors import KerngenError
from kerngen.system.cores import usable_cores

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

AGAIN_S = 0.05  # after which a signal comes again that came where nothing can be raised


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


def settle_home() -> None:
    """Give a process whose user has no home one in which nothing can be made.

    Each of those that keep files there (kerngen, CuPy, torch) has its own idea of such a user, a folder `~` among them.
    Now it is to them as a home that cannot be written: what needs a place says which variable names one.
    """
    if not os.path.isabs(os.path.expanduser("~")):
        os.environ["HOME"] = os.devnull


def settle_threads() -> None:
    """Let torch's threads sleep while they wait for each other, and be no more than may run here.

    A thread that waits in a loop holds the core that the other one needs: where others compute too, each of a model's
    thousand small products then takes a time slice. OpenMP reads both variables as torch is loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if (cores := usable_cores()) < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))


class Terminated(KeyboardInterrupt):
    """By SIGTERM. Of a plain KeyboardInterrupt that comes while a text is executed, as dataclasses are made by, Python
    remembers that it came: whatever was made of it, the process dies of SIGINT in the end.
    """


@contextmanager
def stopped_by() -> Iterator[Callable[[], signal.Signals]]:
    """Within it SIGTERM, which Slurm and Kubernetes send, ends a command as Ctrl-C does: by KeyboardInterrupt.

    So a report is printed, and compilers are stopped. Yields a function that says which of the two it was. More of
    them change nothing: `timeout` sends two. Where SIGTERM is ignored or handled already, that stays. One that comes
    while an object is being destroyed, from where nothing can be raised, comes again a moment later.
    """
    received = signal.SIGINT
    lost: list[threading.Timer] = []
    say = sys.unraisablehook

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if received != number:
            received = signal.Signals(number)
            raise Terminated

    def come_again(unraisable: UnraisableHookArgs) -> None:
        nonlocal received
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            say(unraisable)
            return
        number, received = received, signal.SIGINT
        lost.append(threading.Timer(AGAIN_S, os.kill, (os.getpid(), number)))
        lost[-1].daemon = True
        lost[-1].start()

    in_charge = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if in_charge:
        signal.signal(signal.SIGTERM, stop)
        sys.unraisablehook = come_again
    try:
        yield lambda: received
    finally:
        if in_charge:
            for timer in lost:
                timer.cancel()
            sys.unraisablehook = say
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def settle_notes() -> None:
    """On a terminal, what is done once and takes seconds is said before it begins: silence reads as a hang."""
    if not sys.stderr.isatty():
        return
    import logging

    log = logging.getLogger("kerngen.tuning_db.shipped")
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
