"""When Ctrl-C and SIGTERM take effect.

Python raises KeyboardInterrupt between any two instructions of the main thread. Libraries do not survive that at every
place: SQLAlchemy's pool loses connections and the lock of its queue, a commit ends in an AssertionError, and a
`concurrent.futures.Future` whose lock is lost is waited for in vain. So work that goes on after an interrupt, or that
others wait for, holds interrupts, and says where they may come.

Other threads see no signals: there nothing is held and nothing comes.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SLICE_S = 0.2  # how long a wait takes no notice
IMPATIENT_S = 1.0
_T = TypeVar("_T")
_Handler = Callable[[int, FrameType | None], Any]


class _Held:
    """Handlers that wait. A SIGINT that comes IMPATIENT_S after another does not: someone at a terminal has had enough.
    Sooner it is the same one once more: `timeout` and others pass on what their group got.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, _Handler] = {}
        self.pending: list[int] = []
        self._first: float | None = None
        self._over = False

    def begin(self) -> None:
        for number in _SIGNALS:
            if callable(handler := signal.getsignal(number)):  # not where it is ignored or ends the process at once
                self.handlers[number] = handler
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._over:
            self.handlers[number](number, frame)
        elif number != signal.SIGINT:
            self.pending.append(number)
        elif self._first is None:
            self._first = now
            self.pending.append(number)
        elif now - self._first >= IMPATIENT_S:
            self.pending.clear()
            self.handlers[number](number, frame)

    def deliver(self) -> None:
        while self.pending:
            number = self.pending.pop(0)
            self.handlers[number](number, None)

    def end(self) -> None:
        """From now on what comes comes at once, wherever this is interrupted."""
        self._over = True
        for number, handler in self.handlers.items():
            if signal.getsignal(number) == self._note:  # not what was put there meanwhile
                signal.signal(number, handler)


_held: _Held | None = None  # the main thread's


@contextmanager
def held() -> Iterator[None]:
    """Within it Ctrl-C and SIGTERM come where `heed` is called, else as it ends. Of several the outermost counts."""
    global _held
    if _held is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _held = _Held()
    try:
        _held.begin()
        yield
    finally:
        was, _held = _held, None
        try:
            was.end()
        finally:
            was.deliver()


def heed() -> None:
    """Let what was held come now: raises KeyboardInterrupt, or what else a handler does."""
    if _held is not None and threading.current_thread() is threading.main_thread():
        _held.deliver()


def result_of(future: Future[_T], timeout_s: float | None = None) -> _T:
    """`future.result`, heeding interrupts meanwhile, and before an exception, which may be their doing: signals go to
    whole groups of processes. Raises TimeoutError as that does.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = _SLICE_S if deadline is None else min(_SLICE_S, max(deadline - time.monotonic(), 0))
        done, _ = wait([future], left_s)
        heed()
        if done:
            return future.result()
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError
