"""Functions called in processes of their own, any of which may die: by a fault in a compiler or on a GPU, or killed.

concurrent.futures' pool has one queue for all its processes. It cannot say which call a dead one was at, gives up the
others with it, and where one dies half-way through its answer it waits for the other half for ever, since it holds
that pipe's other end itself. Here each process has a pipe of its own, and a thread that waits for it: a call that takes
its process down fails alone, and at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import current_process, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any, TypeVar

from kerngen.system.cancellation import Cancellation
from kerngen.system.logs import settle_logging

_T = TypeVar("_T")
_READY = "ready"
_CANCELLED = "cancelled"  # of the call at hand; one that has ended meanwhile leaves it to be passed over
_REAP_S = 5.0  # within which what was killed is gone
_starting = threading.Lock()
_LEFT_TO_THE_PARENT = (signal.SIGINT, signal.SIGTERM)  # a group gets them together, and it is the parent that stops


class ProcessDied(Exception):
    """The process that was called is gone, and its answer with it. started: whether it had come as far as calls."""

    def __init__(self, started: bool) -> None:
        super().__init__(started)
        self.started = started

    def __str__(self) -> str:
        return "the process died" if self.started else "the process ended as it started"


class Processes:
    """Calls functions in `most` processes at most, started as they are needed, each fresh (spawned): nothing of this
    process leaks into them. Close it, or use it as a context; a process ends when this one does, however that goes.
    """

    def __init__(self, most: int, *, tries: int = 1, gives_up: bool = True) -> None:
        """tries: how often a call is made whose process dies; 2 where that may be no fault of the call. What is tried
        again is so one at a time: memory may have been what killed it. gives_up: whether all calls fail once a process
        has ended as it started; False for a server, which outlives what kept it from that.
        """
        self._tries, self._gives_up = tries, gives_up
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="kerngen-process")
        self._of_thread = threading.local()
        self._lock, self._again = threading.Lock(), threading.Lock()
        self._started: list[_Process] = []
        self._closed, self._hopeless = False, False
        # Should nobody close it: before multiprocessing waits for its processes at exit; never in a fork of this one.
        self._kill = Finalize(self, _kill, (self._started,), exitpriority=0)

    def submit(
        self, function: Callable[..., _T], *arguments: Any, cancellation: Cancellation | None = None
    ) -> Future[_T]:
        """A future of what `function` returns or raises. Both ways plain pickles go.

        cancellation: a call that has not begun does not begin then; one that has is told (`cancelled`), and ends as
        soon as `function` heeds it. Its exception is ProcessDied where the process died meanwhile, or processes end as
        they start; CancelledError where `close` came first, or what `cancellation` is of was cancelled.
        Raises RuntimeError once closed.
        """
        if self._closed:
            raise RuntimeError("these Processes are closed")
        return self._threads.submit(self._call, function, arguments, cancellation or Cancellation())

    def _call(self, function: Callable[..., _T], arguments: tuple[Any, ...], cancellation: Cancellation) -> _T:
        for number in range(self._tries):
            if cancellation.is_cancelled:
                raise CancelledError
            try:
                with self._again if number else nullcontext():
                    return self._process().call(function, arguments, cancellation)
            except ProcessDied as e:
                if self._closed:
                    raise CancelledError from None
                if number == self._tries - 1:
                    if not e.started and self._gives_up:
                        self._hopeless = True
                    raise
        raise ValueError("no tries")

    def _process(self) -> _Process:
        process: _Process | None = getattr(self._of_thread, "process", None)
        if process is None or not process.is_alive():  # one that was killed between two calls is no call's fault
            process = self._of_thread.process = self._start()
        return process

    def _start(self) -> _Process:
        with self._lock:
            if self._closed:
                raise CancelledError
            if self._hopeless:  # none of a thousand calls would fare better than the one that found that out
                raise ProcessDied(False)
            self._started[:] = [p for p in self._started if p.is_alive()]
            self._started.append(process := _Process())
        return process

    def close(self) -> None:
        """End its processes, whatever they are at: their calls and those not begun are cancelled."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._kill()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _kill(processes: Sequence[_Process]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


@contextmanager
def _no_script() -> Iterator[None]:
    """A process that is started meanwhile does not run this program's script again, as multiprocessing would have it
    for functions that are defined there: it might have no `if __name__ == "__main__"`, and would do all anew.
    """
    with _starting:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = script


@contextmanager
def _as_no_daemon() -> Iterator[None]:
    """Within it a daemonic process may start others. multiprocessing forbids that, since nobody would end them; ours
    end with the process that started them. Workers of vLLM are daemonic.
    """
    config: dict[str, object] = current_process()._config  # type: ignore[attr-defined]
    before = config.pop("daemon", None)
    try:
        yield
    finally:
        if before is not None:
            config["daemon"] = before


class _Process:
    def __init__(self) -> None:
        context = get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there,))
        resource_tracker.ensure_running()  # which otherwise starts with the process, and lets signals through
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_PARENT)  # until it can ignore them
        try:
            with _no_script(), _as_no_daemon():
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()  # so that the pipe ends with the process
        self._ready = False

    def is_alive(self) -> bool:
        return not wait([self._process.sentinel], 0)  # whoever else waited for the process

    def call(self, function: Callable[..., _T], arguments: tuple[Any, ...], cancellation: Cancellation) -> _T:
        try:
            if not self._ready:
                self._ready = self._pipe.recv() == _READY
            with suppress(BrokenPipeError):  # gone: so is its answer
                self._pipe.send((function, arguments))
            with cancellation.interrupting(self._cancel):  # behind the question, which another thread's would break
                returned, value = self._pipe.recv()
        except (EOFError, OSError) as e:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            raise ProcessDied(self._ready) from e
        if returned:
            answer: _T = value
            return answer
        raise value

    def _cancel(self) -> None:
        with suppress(OSError):  # gone
            self._pipe.send(_CANCELLED)

    def kill(self) -> None:
        if self.is_alive():
            self._process.kill()

    def join(self) -> None:
        self._process.join(_REAP_S)


# -- in the process


_of_this_process: Connection | None = None  # where calls come from


def cancelled() -> Connection:
    """For a function that such a process was told to call: there is something to read once the call is cancelled, or
    who asked is gone. It is left unread. Raises RuntimeError elsewhere.
    """
    if _of_this_process is None:
        raise RuntimeError("this process is none of Processes")
    return _of_this_process


def _serve(pipe: Connection) -> None:
    global _of_this_process
    _of_this_process = pipe
    _end_with_parent()
    settle_logging()
    pipe.send(_READY)
    while True:
        try:
            told = pipe.recv()
        except EOFError:
            return
        except Exception as e:  # what was pickled there is unknown here
            _answer(pipe, False, e)
            continue
        if told == _CANCELLED:
            continue
        function, arguments = told
        try:
            value = function(*arguments)
        except Exception as e:
            e.add_note(f"in its process:\n{traceback.format_exc()}")
            _answer(pipe, False, e)
        else:
            _answer(pipe, True, value)


def _answer(pipe: Connection, returned: bool, value: object) -> None:
    try:
        pipe.send((returned, value))
    except OSError:  # who asked is gone
        os._exit(1)
    except Exception as e:  # no pickle: nothing was sent
        pipe.send((False, TypeError(f"{type(value).__name__} cannot be sent to another process: {e}")))


def _end_with_parent() -> None:
    """Leave signals to the parent, and exit when it is gone, however it went."""
    for number in _LEFT_TO_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_THE_PARENT)
    if (parent := parent_process()) is not None:

        def watch() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
