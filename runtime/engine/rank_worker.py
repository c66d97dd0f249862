"""The process of a rank other than 0: it does what rank 0 says, plan by plan, and ends when rank 0 does."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import kerngen
from kerngen.errors import KerngenError, UsageError, printable
from kerngen.runtime.engine.core import Engine
from kerngen.runtime.engine.ranks import ALIVE_S, FOLDER, Alive, Hello, Last, board_of, connect, local_device, meet
from kerngen.runtime.engine.runner import EmbeddingFailed
from kerngen.runtime.executors.collectives import Distributed
from kerngen.runtime.world import World
from kerngen.system.logs import settle_logging


class Follower:
    """A rank that decides nothing."""

    def __init__(self, place: Path, store: dist.Store, world: World, device: str | None) -> None:
        self.world, self.device, self._store, self._place = world, device, store, place
        if place.stat().st_uid != os.getuid():
            raise UsageError(f"{place} is another user's: what comes from there is not trusted")
        hello = Hello(world.rank, os.getpid(), kerngen.__version__, board_of(device))
        self._control, self._life = (self._connected(place, hello) for _ in range(2))
        self._sending = threading.Lock()
        self._plans = 0
        self._collectives: Distributed | None = None
        self._part: Any = None  # what rank 0 had opened: a Session, or less
        self._engine: Engine | None = None
        self._answers: dict[str, Callable[..., Any]] = {
            "connect": self._connect, "digest": self._digest, "load": self._load, "room": self._room,
            "engine": self._make_engine, "ready": self._make_ready,
        }  # fmt: skip
        threading.Thread(target=self._live, daemon=True).start()

    @staticmethod
    def _connected(place: Path, hello: Hello) -> Connection:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.connect(os.fspath(place))
        connection = Connection(link.detach())
        connection.send(hello)
        return connection

    def _live(self) -> None:
        """In a thread: signs of life, until rank 0 has ended."""
        try:
            while not self._life.poll(ALIVE_S):  # rank 0 says nothing here: what can be read is the end
                begun = 0 if self._collectives is None else self._collectives.begun
                self._say(Alive(self._plans, begun))
        except OSError:
            pass
        self.leave(1)

    def leave(self, code: int) -> NoReturn:
        """End the process, without the clean-up of libraries, which may wait for ranks that have gone."""
        if self._place.parent.name.startswith(FOLDER):  # where rank 0 was killed nobody else removes it
            shutil.rmtree(self._place.parent, ignore_errors=True)
        os._exit(code)

    def _say(self, what: Alive | Last) -> None:
        with self._sending:
            self._life.send(what)

    def serve(self) -> None:
        """Until rank 0 says "end", or is gone."""
        while True:
            try:
                what, *values = self._control.recv()
            except (EOFError, OSError):
                return
            if what == "end":
                return
            if what == "plan":
                self._run(*values)
            elif what == "meet":
                self._meet(*values)
            else:
                self._control.send(self._answers[what](*values))

    def _meet(self, threads: int) -> None:
        if threads:
            torch.set_num_threads(threads)
        self._collectives = meet(self._store, self.world, self.device)

    def _connect(self) -> None:
        if self._collectives is None:
            raise TypeError("rank 0 has met nobody")
        connect(self._collectives, self.device)

    def _digest(self, digest: Any) -> str:
        return "" if digest is None else digest()

    def _load(self, opens: Any) -> None:
        self._engine = self._part = None  # the old one goes before the new one comes
        self._part = opens(self._collectives, self.device, None)

    def _room(self, batch: int, max_len: int) -> Any:
        self._engine = None
        return self._part.room(batch, max_len)

    def _make_engine(self, options: dict[str, Any], drafts: bool) -> None:
        self._engine = None
        gc.collect()  # a runner and its graphs know each other: the old cache goes before the new one comes
        self._engine = Engine(self._part.model, self._part.drafter if drafts else None, **options)

    def _make_ready(self, usual: Any) -> None:
        self._made.prepare(usual=usual)

    @torch.inference_mode()
    def _run(self, plan: Any) -> None:
        self._plans += 1
        with suppress(EmbeddingFailed):  # on all ranks, and another plan comes
            self._made.runner.run(plan, self._agree)

    def _agree(self, failed: EmbeddingFailed | None) -> EmbeddingFailed | None:
        try:
            self._control.send(failed)
            _, first = self._control.recv()
        except (EOFError, OSError):  # rank 0 is gone
            self.leave(1)
        return first

    @property
    def _made(self) -> Engine:
        if self._engine is None:
            raise TypeError("rank 0 has made no engine")
        return self._engine

    def fail(self, error: BaseException) -> None:
        """Tell rank 0 why this rank ends."""
        message, hint = f"{type(error).__name__}: {error}", None
        if isinstance(error, KerngenError):
            message, hint = error.message, error.hint
        try:
            self._say(Last(message, hint))
        except OSError:  # it has ended: this is why
            os._exit(1)


def follow(place: Path, store: dist.Store, world: World, device: str | None) -> NoReturn:
    """Be a rank other than 0 until it is over, and end the process. place: rank 0's socket."""
    settle_logging()
    warnings.simplefilter("ignore")  # rank 0 says the same
    for number in (signal.SIGINT, signal.SIGTERM):  # a group gets them together, and it is rank 0 that stops
        signal.signal(number, signal.SIG_IGN)
    follower = Follower(place, store, world, device)
    try:
        follower.serve()
    except BaseException as e:
        if not isinstance(e, KerngenError):
            print(printable(traceback.format_exc()), end="", file=sys.stderr, flush=True)
        follower.fail(e)
        os._exit(1)
    follower.leave(0)


def follow_torchrun(world: World, device: str | None) -> NoReturn:
    """As `follow`, of a process that torchrun started."""
    store = next(dist.rendezvous("env://"))[0]
    place = Path(store.get("kerngen-ranks").decode())
    follow(place, store, world, local_device(device, world.rank))


def main(folder: str, rank: str, size: str, device: str) -> None:
    """Of a process that rank 0 started; `folder` has its socket and what the ranks meet by."""
    store = dist.FileStore(os.fspath(Path(folder, "store")), int(size))
    follow(Path(folder, "ranks"), store, World(int(rank), int(size)), device or None)
