"""The engine's process is begun before it is known what it will load: its imports take as long as the other process's,
and go on beside them. Light: this module comes before those imports.
"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from kerngen.system.gpus import gpus_here, has_driver


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


def begin(*, prepares: bool = False) -> BegunEngine:
    """prepares: the databases that it will probably ask (`prepare_databases`)."""
    context = get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=_engine, args=(theirs,), name="kerngen-engine")
    is_of_use = prepares and has_driver()
    beside = [context.Process(target=prepare_databases, name="kerngen-prepare")] if is_of_use else []
    for started in (*beside, process):
        started.start()  # no daemon: those may have no processes of their own, and compilers are some
        atexit.register(started.kill)  # before what waits for it
    theirs.close()  # so that its end is seen here
    return BegunEngine(process, connection)


@contextmanager
def begun(*, prepares: bool = False) -> Iterator[BegunEngine]:
    """As `begin`; it is gone afterwards, whether it was given anything to load or not."""
    engine = begin(prepares=prepares)
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

    with suppress(ImportError):  # the launcher says what is lacking
        import cupy  # noqa: F401
    try:
        options = connection.recv()
    except (EOFError, OSError):  # nothing is to be loaded: the other process is gone, or refused what it was told
        return
    serve(connection, options)


def prepare_databases() -> None:
    """Make the databases of what is shipped for this machine's GPUs, where nobody did so before: it takes all cores
    some seconds, in which others import and load weights.
    """
    from kerngen.boards import identify
    from kerngen.tuning_db.read.boards import nearest_board
    from kerngen.tuning_db.shipped import prepare

    for name, num_sms, mem_gib in sorted({gpu[:3] for gpu in gpus_here()}):
        profile = identify(name, num_sms, mem_gib)
        if profile is not None and (board := nearest_board(profile)) is not None:
            prepare(board)
