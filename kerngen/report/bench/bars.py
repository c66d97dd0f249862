"""Plots with a row a thing: its name, and below it bars and marks along one axis."""

from __future__ import annotations

from collections.abc import Iterable

from kerngen.report.svg import BOTTOM, RIGHT, TOP, WIDTH, Plot, Scale

NAME, BAR, BETWEEN = 15.0, 9.0, 8.0  # pixels: a name's line, a bar's height, what stands between two rows
VALUES = 52.0  # pixels, right of the longest bar, for what it says
EDGE = 14.0  # pixels, left of the axis
MOST_LETTERS = 52  # of a name


class Bars:
    """Row after row: `begin` one, then draw in it."""

    def __init__(
        self, title: str, text: str, axis: tuple[str, str, float, float], rows: int, bars: int = 1, *,
        is_log: bool = False,
    ) -> None:  # fmt: skip
        """axis: name, unit, low, high. rows: how many there will be, of so many bars each."""
        self._step = NAME + bars * (BAR + 2) + BETWEEN
        height = TOP + rows * self._step + BOTTOM
        name, unit, low, high = axis
        x = Scale(name, unit, low, high, EDGE, WIDTH - RIGHT - VALUES, is_log)
        self.plot = Plot(title, text, x, Scale("rows", "none", 0.0, 1.0, TOP, height - BOTTOM), height)
        self._at = TOP - self._step

    def begin(self, name: str) -> None:
        """The next row."""
        self._at += self._step
        shown = name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…"
        self.plot.words(EDGE, self._at + NAME - 4, shown, "name")

    def bar(self, start: float, end: float, kind: str, at: int = 0, *, row: int | None = None, value: str = "") -> None:
        """Between two values, in either order; the row's bar number `at`. value: beside its right end."""
        start, end = sorted((start, end))
        top = self._top(at)
        self.plot.bar(start, end, top, BAR, kind, row=row)
        if value:
            self.plot.words(self.plot.x(end) + 4, self.value_y(at), value)

    def value_y(self, at: int = 0) -> float:
        """The base line of what is written beside a bar."""
        return self._top(at) + BAR - 0.5

    def range(self, low: float, high: float, at: int = 0) -> None:
        """A line over a bar, from `low` to `high`."""
        middle = self._top(at) + BAR / 2
        y = self.plot.y
        self.plot.line([(v, y.low + (middle - y.start) / (y.end - y.start)) for v in (low, high)], "one")

    def marks(self, values: Iterable[float], kind: str, at: int = 0) -> None:
        middle = self._top(at) + BAR / 2
        y = self.plot.y
        points = [(v, y.low + (middle - y.start) / (y.end - y.start)) for v in values]
        self.plot.marks(points, "halo")  # so that it is seen on a bar
        self.plot.marks(points, kind)

    def render(self, id: str) -> str:
        return self.plot.render(id, has_y=False)

    def _top(self, at: int) -> float:
        return self._at + NAME + at * (BAR + 2)
