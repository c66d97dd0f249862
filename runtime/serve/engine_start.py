"""The engine's process is begun before it is known what it will load: its imports take as long as the other process's,
and go on beside them. Light: this module comes before those imports.
"""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def begin(*, prepares: bool = False) -> BegunEngine:
    """prepares: the databases that it will probably ask (`prepare_databases`)."""
    context = get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=_engine, args=(theirs, prepares), name="kerngen-engine")
    process.start()  # no daemon: those may have no processes of their own, and compilers are some
    atexit.register(process.kill)  # before what waits for it
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


def _engine(connection: Connection, prepares: bool) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a group gets them together, and it is the other that stops
        signal.signal(number, signal.SIG_IGN)
    if prepares:
        threading.Thread(target=prepare_databases, daemon=True, name="kerngen-prepare").start()
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
    import torch

    from kerngen.boards import identify
    from kerngen.tuning_db.read.boards import nearest_board
    from kerngen.tuning_db.shipped import prepare

    if not torch.cuda.is_available():
        return
    kinds = {(p.name, p.multi_processor_count, round(p.total_memory / 2**30, 1))
             for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))}  # fmt: skip
    for kind in kinds:
        profile = identify(*kind)
        if profile is not None and (board := nearest_board(profile)) is not None:
            prepare(board)
