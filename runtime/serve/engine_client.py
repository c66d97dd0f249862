"""The engine's client in the HTTP process: requests in, tokens out, as async streams."""

from __future__ import annotations

import asyncio
import atexit
import threading
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from kerngen.errors import UsageError
from kerngen.runtime.serve.engine_process import (
    Cancel,
    Failed,
    Loading,
    Made,
    Options,
    Ready,
    Submit,
    TokenRequest,
    Told,
)
from kerngen.runtime.serve.engine_start import BegunEngine, begin
from kerngen.runtime.serve.engines import EngineFailed, EngineStopped, OnLoad

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from kerngen.runtime.engine import Load

STOP_S = 10.0  # within which an engine that is told to stop is gone; then it is killed


class EngineClient:
    """The engine's process and the requests that it works on (`Engines`). `start`, then from one event loop alone.

    on_load: is told, while the weights load, how many bytes of how many are there, and "", and while kernels are built,
    how many of how many, and which.
    """

    def __init__(self, options: Options, on_load: OnLoad | None = None, begun: BegunEngine | None = None) -> None:
        """begun: the process; None for one that `start` begins."""
        self._options, self._on_load, self._begun = options, on_load, begun
        self._numbers = count()
        self._streams: dict[int, asyncio.Queue[Made]] = {}
        self._failed: Failed | None = None
        self._closing = False
        self._process: BaseProcess | None = None
        self.load: Load | None = None
        self.replicas = ()
        self.ended = asyncio.Event()  # by itself or by `close`

    async def start(self) -> Ready:
        """Start the process and wait until it is ready."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        begun = self._begun or begin()
        self._process, self._connection = begun.process, begun.connection
        self._outbox: SimpleQueue[Options | Submit | Cancel | None] = SimpleQueue()
        self._outbox.put(self._options)
        for work in (self._read, self._write):  # a pipe may be full while the engine is at a step
            threading.Thread(target=work, name="kerngen-engine", daemon=True).start()
        return await self._ready

    @property
    def is_alive(self) -> bool:
        return self._failed is None and not self._closing

    @property
    def is_lost(self) -> bool:
        return self._failed is not None and not self._closing

    @property
    def why_dead(self) -> str:
        return "" if self._failed is None else self._failed.message

    async def stream(
        self, request: TokenRequest, enough: Callable[[], bool] = lambda: False
    ) -> AsyncGenerator[Made, None]:
        """What the engine makes of a request, as it comes. Whoever leaves the loop early, or is cancelled, ends it, and
        what it holds is free at once. enough: whether what came is all that is wanted; the engine is told to end it
        then, and the last that comes has no tokens, the reason "stop" and what the engine says of it all.

        Raises UsageError for what the engine does not take, EngineFailed where it is no more or computes no number,
        EngineStopped after `end`.
        """
        if not self.is_alive:
            raise EngineFailed(self.why_dead or "the engine has stopped")
        number = next(self._numbers)
        queue = self._streams[number] = asyncio.Queue()
        is_over = False
        try:
            self._outbox.put(Submit(number, replace(request, prompt=array("i", request.prompt))))
            while not is_over:
                made = await queue.get()
                # More than one step's where this process is behind: they go out together.
                while not made.reason and not queue.empty():
                    later = queue.get_nowait()
                    if later.reason in ("refused", "error", "stopped"):
                        yield made
                        made = later
                    else:
                        made = made.then(later)
                if made.reason == "stopped":
                    raise EngineStopped(made.error)
                is_over = bool(made.reason)
                if made.reason == "refused":
                    raise UsageError(made.error)
                if made.reason == "error":
                    raise EngineFailed(made.error)
                yield made
                if not is_over and enough():
                    self._outbox.put(Cancel(number))
                    is_over = True
                    while not (made := await queue.get()).reason:
                        pass  # of steps that had begun
                    yield Made(number, [], reason="stop", stats=made.stats)
        finally:
            del self._streams[number]
            if not is_over:
                self._outbox.put(Cancel(number))

    def end(self, why: str) -> None:
        for number, queue in self._streams.items():
            queue.put_nowait(Made(number, [], reason="stopped", error=why))

    async def close(self) -> None:
        self._closing = True
        if (process := self._process) is None:
            return
        self._outbox.put(None)
        if self._ready.cancelled() or not self._ready.done():  # it reads nothing before
            process.kill()
        await asyncio.to_thread(process.join, STOP_S)
        if process.is_alive():
            process.kill()
            await asyncio.to_thread(process.join, STOP_S)
        atexit.unregister(process.kill)
        self._fail(Failed("the engine has stopped"))

    # -- in threads of their own

    def _write(self) -> None:
        with suppress(OSError):  # one that is gone is seen by the reader
            while True:
                told = self._outbox.get()
                self._connection.send(told)
                if told is None:
                    return

    def _read(self) -> None:
        told: Failed | Loading | Ready | Told
        try:
            while True:
                told = self._connection.recv()
                if not self._tell(self._heed, told) or isinstance(told, Failed):
                    return
        except (EOFError, OSError):
            assert self._process is not None
            self._process.join(STOP_S)
            code = self._process.exitcode
            lost = Failed("the engine's process died" + ("" if code is None else f" (exit code {code})"))
            self._tell(self._fail, lost)

    def _tell(self, heed: Callable[[Any], None], told: object) -> bool:
        """False where nobody is left to tell: Ctrl-C came while the weights were loading."""
        try:
            self._loop.call_soon_threadsafe(heed, told)
        except RuntimeError:  # the event loop has ended
            return False
        return True

    # -- in the event loop

    def _heed(self, told: Failed | Loading | Ready | Told) -> None:
        if isinstance(told, Failed):
            self._fail(told)
        elif isinstance(told, Loading):
            if self._on_load is not None:
                self._on_load(told.done, told.total, told.kernel)
        elif isinstance(told, Ready):
            if not self._ready.done():  # by Ctrl-C
                self._ready.set_result(told)
        else:
            self.load = told.load
            for made in told.made:
                if (queue := self._streams.get(made.number)) is not None:
                    queue.put_nowait(made)

    def _fail(self, failed: Failed) -> None:
        if self._failed is not None:
            return
        self._failed = failed
        self.ended.set()
        if not self._ready.done():
            kind = UsageError if failed.is_misuse else EngineFailed
            self._ready.set_exception(kind(failed.message, hint=failed.hint))
        for number, queue in self._streams.items():
            queue.put_nowait(Made(number, [], reason="error", error=failed.message))
