"""Work that nobody may want any more: who asked for it cancels it, and who does it says how it is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Cancellation:
    """Of a piece of work. Any thread may cancel it, more than once too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._interrupts: list[Callable[[], object]] = []
        self.is_cancelled = False

    def cancel(self) -> None:
        """The work is not wanted. Returns once all that it is in are interrupted, and waits for none to end."""
        with self._lock:
            self.is_cancelled = True
            while self._interrupts:
                self._interrupts.pop()()

    @contextmanager
    def interrupting(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """Within it `interrupt` is called if the work is cancelled, at once where it has been; behind it never. It is
        called in the thread that cancels, and must not wait.
        """
        with self._lock:
            if self.is_cancelled:
                interrupt()
            else:
                self._interrupts.append(interrupt)
        try:
            yield
        finally:
            with self._lock:
                if interrupt in self._interrupts:
                    self._interrupts.remove(interrupt)
