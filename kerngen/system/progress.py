"""Progress on stderr: a bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

LINE_EVERY_S = 10.0


class Progress(Protocol):
    """What a long run reports to. `total` shrinks as parts of it end early."""

    def update(self, done: int, total: int, text: str) -> None: ...


class Reporter:
    """update(done, total, text) as often as one likes; total None where it is not known. quiet: say nothing.

    most_left: how many seconds it may go on at most, where that is known; no more is told.
    """

    most_left: Callable[[], float] = staticmethod(lambda: inf)

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        self._what, self._quiet = what, quiet
        self._start = self._said = time.monotonic()
        self._bar: Bar | None = None
        self._task: Any = None
        self._is_over_stdout = False

    def __enter__(self) -> Reporter:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn(self._what), BarColumn(), TextColumn("{task.fields[amount]}"),
                       _time_left(lambda: max(self.most_left(), 0.0)), TextColumn("{task.description}"))  # fmt: skip
            # What others print to stdout is theirs: rich would send it to stderr, where the bar is.
            self._is_over_stdout = sys.stdout.isatty()
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True,
                                 redirect_stdout=self._is_over_stdout)  # fmt: skip
            self._task = self._bar.add_task("", total=None, amount="")
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> None:
        """Take the bar away, and say nothing more: what is told next stands alone."""
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._quiet = None, True

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def print(self, line: str) -> None:
        """Write `line` to stdout, whole and at once; on a terminal it stands above the bar."""
        if (bar := self._bar) is not None and self._is_over_stdout:
            bar.stop()
            print(line, flush=True)
            bar.start()
        else:
            print(line, flush=True)

    def note(self, line: str) -> None:
        """Write `line` to stderr, to stay; on a terminal it stands above the bar."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        elif not self._quiet:
            print(line, file=sys.stderr, flush=True)

    def update(self, done: int, total: int | None, text: str) -> None:
        self._show(done, total, f"{done}" if total is None else f"{done}/{total}", text)

    def update_bytes(self, done: int, total: int) -> None:
        """As `update`, of bytes that are loaded."""
        per, unit = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
        self._show(done, total, f"loading {done / per:.1f} of {total / per:.1f} {unit}", "")

    def _show(self, done: int, total: int | None, amount: str, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=text[:60], amount=amount)
        elif not self._quiet and time.monotonic() - self._said >= LINE_EVERY_S:
            self._said = time.monotonic()
            line = f"{self._what}: {amount}, {self._left(done, total)}" + (f"; {text}" if text else "")
            print(line, file=sys.stderr, flush=True)

    def _left(self, done: int, total: int | None) -> str:
        elapsed, most = self.elapsed_s, max(self.most_left(), 0.0)
        left = elapsed / done * max(total - done, 0) if done and total is not None else inf
        if (left := min(left, most)) == inf:
            return f"{elapsed:.0f} s"
        return f"{elapsed:.0f} s, at most {left:.0f} s left"


def _time_left(most: Callable[[], float]) -> ProgressColumn:
    """Rich's own column for it, with no more than `most` seconds."""
    from rich.progress import ProgressColumn
    from rich.text import Text

    class TimeLeft(ProgressColumn):
        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            expected = None if task.total is None else task.time_remaining
            if (left := min(inf if expected is None else expected, most())) == inf:
                return Text("" if task.total is None else "-:--:--", style="progress.remaining")
            minutes, seconds = divmod(int(left), 60)
            return Text(f"{minutes // 60}:{minutes % 60:02}:{seconds:02}", style="progress.remaining")

    return TimeLeft()
