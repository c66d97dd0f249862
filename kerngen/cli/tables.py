"""Lines and tables for people: they fit the terminal, and no word is broken where it ends."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from kerngen.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

PIPED_WIDTH = 200  # of tables, where there is no terminal to measure
BAR_CELLS = 8
GAP = 2  # columns between two columns of a table


def width(default: int | None = None) -> int | None:
    """Columns of the terminal that stdout is, or $COLUMNS; `default` where neither says."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return default


def line_width(*, err: bool = False) -> int | None:
    """Columns of the terminal that stdout is, or stderr; None where another program reads it and gets lines whole."""
    stream = sys.stderr if err else sys.stdout
    if not stream.isatty():
        return None
    if err and not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        return os.get_terminal_size(stream.fileno()).columns or 80
    return width()


def fitted(text: str, indent: int = 2, *, err: bool = False) -> str:
    """`text` in lines as long as the terminal is wide. err: it goes to stderr."""
    return wrapped(text, line_width(err=err), indent)


def wrapped(text: str, columns: int | None, indent: int = 0) -> str:
    """`text` in lines of so many columns, broken between words; lines but the first begin with `indent` more spaces."""
    if columns is None:
        return text
    begins = len(text) - len(text.lstrip())
    return textwrap.fill(text.lstrip(), max(columns, begins + indent + 1), initial_indent=" " * begins,
                         subsequent_indent=" " * (begins + indent), break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


def echo(text: str, *, err: bool = False) -> None:
    """Print text that quotes what a file or a database holds, as `printable`, on lines as they are."""
    click.echo(printable(text), err=err)


def say(text: str, indent: int = 2, *, fg: str | None = None, err: bool = False) -> None:
    """Print a line, wrapped to the terminal; whole where another program reads it. fg: its colour on a terminal.

    err: to stderr, without a colour.
    """
    line = fitted(printable(text), indent, err=err)
    if err:
        print(line, file=sys.stderr, flush=True)
        return
    print(click.style(line, fg=fg) if fg and sys.stdout.isatty() else line)  # click.echo has an encoding of its own


class Table:
    """A table that rich prints: as columns where each word has room in them, else a paragraph a row.

    columns: a name that begins with ">" is of what is set to the right.
    """

    def __init__(self, title: str, *columns: str) -> None:
        self.title, self.rows = printable(title), list[Sequence[str]]()
        self._names = [_cell(name.lstrip(">")) for name in columns]
        self._right = [name.startswith(">") for name in columns]

    def add_row(self, *cells: str) -> None:
        self.rows.append([_cell(cell) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        room = options.max_width
        if self.title:
            yield Text(wrapped(self.title, room, 2), style="bold")
        widths = self._widths(room)
        lines = self._paragraphs(room) if widths is None else self._columns(widths)
        for line, style in lines:
            yield Text(line, style=style, no_wrap=True, overflow="ignore")

    def _widths(self, room: int) -> list[int] | None:
        """Of the columns, together as wide as `room` at most; None where some word would have none."""
        cells = [[name, *(row[i] for row in self.rows)] for i, name in enumerate(self._names)]
        most = [max(map(len, column)) for column in cells]
        least = [max(len(word) for cell in column for word in cell.split() or [""]) for column in cells]
        left = room - GAP * (len(cells) - 1) - sum(least)
        if left < 0:
            return None
        found = list(least)
        for i in sorted(range(len(cells)), key=lambda i: most[i] - least[i]):  # those that need little get it
            found[i] += min(left, most[i] - least[i])
            left -= found[i] - least[i]
        return found

    def _columns(self, widths: list[int]) -> Iterator[tuple[str, str]]:
        """(line, style)"""
        for line in self._lines(self._names, widths):
            yield line, "bold"
        for row in self.rows:
            for line in self._lines(row, widths):
                yield line, ""

    def _lines(self, cells: Sequence[str], widths: list[int]) -> Iterator[str]:
        columns = [_cell_lines(cell, room) for cell, room in zip(cells, widths, strict=True)]
        for at in range(max(map(len, columns))):
            pieces = [column[at] if at < len(column) else "" for column in columns]
            placed = zip(pieces, widths, self._right, strict=True)
            line = (piece.rjust(room) if right else piece.ljust(room) for piece, room, right in placed)
            yield (" " * GAP).join(line).rstrip()

    def _paragraphs(self, room: int) -> Iterator[tuple[str, str]]:
        for row in self.rows:
            others = (f"{name} {cell}".strip() for name, cell in zip(self._names[1:], row[1:], strict=True) if cell)
            yield row[0], ""
            for line in wrapped("  " + "; ".join(others), room).splitlines():
                yield line, ""


def _cell(text: str) -> str:
    return printable(text).replace("\n", " ").replace("\t", " ")


def _cell_lines(cell: str, room: int) -> list[str]:
    if len(cell) <= room:
        return [cell]
    return textwrap.wrap(cell, max(room, 1), break_long_words=False, break_on_hyphens=False) or [""]


def new_console() -> Console:
    """On stdout, as wide as its terminal or $COLUMNS; PIPED_WIDTH where neither says. It prints text as `printable`."""
    from rich.console import Console

    class Plain(Console):
        def print(self, *objects: Any, **how: Any) -> None:
            super().print(*(printable(o) if isinstance(o, str) else o for o in objects), **how)

    return Plain(highlight=False, markup=False, emoji=False, width=width(PIPED_WIDTH))


def share_bar(share: float) -> str:
    """A bar of BAR_CELLS characters at most, in eighths of one where stdout can say that."""
    eighths = round(8 * BAR_CELLS * max(0.0, min(share, 1.0)))
    try:
        "█▏".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#" * round(eighths / 8)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]
