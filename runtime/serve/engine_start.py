"""The engine's process is begun before it is known what it will load: its imports take as long as the other process's,
and go on beside them. Light: this module comes before those imports.
"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess


@dataclass(frozen=True, slots=True, eq=False)
class BegunEngine:
    """A process that imports what an engine needs and waits for `Options`, which are sent by `connection`."""

    process: BaseProcess
    connection: Connection

    def end(self) -> None:
        """Kill it, if it is still there."""
        self.process.kill()
        self.process.join()
        atexit.unregister(self.process.kill)


def begin() -> BegunEngine:
    context = get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=_engine, args=(theirs,), name="kerngen-engine")
    process.start()  # no daemon: those may have no processes of their own, and compilers are some
    atexit.register(process.kill)  # before what waits for it
    theirs.close()  # so that its end is seen here
    return BegunEngine(process, connection)


@contextmanager
def begun() -> Iterator[BegunEngine]:
    """One that is gone afterwards, whether it was given anything to load or not."""
    engine = begin()
    try:
        yield engine
    finally:
        engine.end()


def _engine(connection: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a group gets them together, and it is the other that stops
        signal.signal(number, signal.SIG_IGN)
    import kerngen.runtime.executors.launch
    import kerngen.runtime.ops.kernels
    import kerngen.runtime.session  # noqa: F401
    from kerngen.runtime.serve.engine_process import serve

    try:
        options = connection.recv()
    except (EOFError, OSError):  # nothing is to be loaded: the other process is gone, or refused what it was told
        return
    serve(connection, options)
