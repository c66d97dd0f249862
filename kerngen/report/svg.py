"""A plot as SVG text: two axes with units, lines, marks and bars. Nothing in it moves, and it needs no script.

Sizes are those of a phone held upright, where one unit is one pixel; a wider window shows several plots beside each
other. Colours are classes (`s0` to `s9`), which the page gives its light and its dark values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 340.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 10.0, 40.0
NUM_COLOURS = 10  # in page.css
COUNTED = ("number", "rows", "tokens", "keys")  # units of what has no halves
PER_TICK = 52.0  # pixels that a tick's label needs, along x

Pixels = tuple[float, float]  # x, y


def finite(value: float) -> float:
    """`value`. Raises ValueError for what is no number: that must not reach a page."""
    if not math.isfinite(value):
        raise ValueError(f"a plot was given {value}")
    return value


def px(value: float) -> str:
    """A coordinate. Raises ValueError for what is no number."""
    return f"{finite(value):.1f}".removesuffix(".0")


def short(value: float) -> str:
    """A tick's label: 0.5, 20, 4096, 32.8k, 1M."""
    for least, per, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / per:.3g}{unit}"
    return f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Scale:
    """Values to pixels. name, unit: both are written beside the axis. start, end: pixels of low and high."""

    name: str
    unit: str
    low: float
    high: float
    start: float
    end: float
    is_log: bool = False
    is_binary: bool = False  # with a tick at powers of two

    def __call__(self, value: float) -> float:
        low, high, at = (math.log2(v) if self.is_log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    @property
    def label(self) -> str:
        return f"{self.name} ({self.unit})"

    def ticks(self, room: float) -> list[float]:
        """Round values within it, no closer than `room` pixels; whole ones of what is counted."""
        found = self._ticks(room)
        return [v for v in found if v == int(v)] if self.unit in COUNTED else found

    def _ticks(self, room: float) -> list[float]:
        most = max(2, int(abs(self.end - self.start) / room))
        if self.is_binary:
            return _binary_ticks(self.low, self.high, most)
        return _log_ticks(self.low, self.high, most) if self.is_log else _linear_ticks(self.low, self.high, most)

    @property
    def data(self) -> str:
        """For whoever reads values back from pixels."""
        return " ".join(["log" if self.is_log else "linear", *map(repr, (self.low, self.high)), px(self.start),
                         px(self.end)])  # fmt: skip


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """1, 2, 5, 10, or decades where those are too many; round values where all of them are too far apart."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for within in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        found = [v for e in range(first, last + 1) for m in within if low <= (v := m * 10.0**e) <= high]
        if len(found) <= most:
            return found if len(found) > 2 else [v for v in _linear_ticks(low, high, most) if v > 0]
    return found[:: math.ceil(len(found) / most)]


def _binary_ticks(low: float, high: float, most: int) -> list[float]:
    exponents = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
    step = max(1, math.ceil(len(exponents) / most))
    return [2.0**e for e in exponents if e % step == 0]


def spread(values: Iterable[float], *, is_log: bool) -> tuple[float, float]:
    """A scale's low and high around `values`, with a margin; never empty."""
    found = [v for v in values if math.isfinite(v) and (v > 0 or not is_log)]
    low, high = (min(found), max(found)) if found else (1.0, 2.0)
    if is_log:
        margin = max(high / low, 1.5) ** 0.06
        return low / margin, high * margin
    margin = (high - low or abs(high) or 1.0) * 0.05
    return low - margin, high + margin


@dataclass(slots=True)
class Plot:
    """One plot. title, text: what someone is told who does not see it."""

    title: str
    text: str
    x: Scale
    y: Scale
    height: float = HEIGHT
    parts: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        title: str,
        text: str,
        x: tuple[str, str, Iterable[float]],
        y: tuple[str, str, Iterable[float]],
        *,
        log_x: bool = False,
        log_y: bool = False,
        binary_x: bool = False,
    ) -> Plot:
        """Axes given as (name, unit, the values that they must hold)."""
        x_low, x_high = spread(x[2], is_log=log_x)
        y_low, y_high = spread(y[2], is_log=log_y)
        return cls(title, text, Scale(x[0], x[1], x_low, x_high, LEFT, WIDTH - RIGHT, log_x, binary_x and log_x),
                   Scale(y[0], y[1], y_low, y_high, HEIGHT - BOTTOM, TOP, log_y))  # fmt: skip

    # -- what is drawn

    def line(self, points: Sequence[tuple[float, float]], kind: str, *, is_stepped: bool = False) -> None:
        """Through `points`, values not pixels; what of it lies outside the axes is cut off there. kind: classes."""
        corners = [(finite(self.x(a)), finite(self.y(b))) for a, b in points]
        if is_stepped:
            corners = [c for i, (x, y) in enumerate(corners) for c in ((x, corners[max(i - 1, 0)][1]), (x, y))][1:]
        path: list[str] = []
        was: tuple[str, str] | None = None
        for start, end in pairwise(corners):
            if (piece := self._within(start, end)) is None:
                continue
            (x0, y0), (x1, y1) = ((px(x), px(y)) for x, y in piece)
            if (x0, y0) == (x1, y1) == was:  # a step of no height
                continue
            if (x0, y0) != was:
                path.append(f"M{x0} {y0}")
            path.append(f"H{x1}" if y1 == y0 else f"V{y1}" if x1 == x0 else f"L{x1} {y1}")
            was = x1, y1
        if path:
            self.parts.append(f'<path class="line {kind}" d="{"".join(path)}"/>')

    def _within(self, start: Pixels, end: Pixels) -> tuple[Pixels, Pixels] | None:
        """What of a straight line lies between the axes' ends, all in pixels; None if it has no length there.

        Source: Liang and Barsky, A New Concept and Method for Line Clipping, ACM TOG 3(1), 1984.
        """
        enters, leaves = 0.0, 1.0  # as shares of the way from start to end
        for scale, a, b in ((self.x, start[0], end[0]), (self.y, start[1], end[1])):
            low, high = sorted((scale.start, scale.end))
            if a == b:
                if not low <= a <= high:
                    return None
                continue
            near, far = sorted(((low - a) / (b - a), (high - a) / (b - a)))
            enters, leaves = max(enters, near), min(leaves, far)
        if enters >= leaves:
            return None
        (x0, y0), (x1, y1) = start, end
        return (
            start if enters == 0 else (x0 + enters * (x1 - x0), y0 + enters * (y1 - y0)),
            end if leaves == 1 else (x0 + leaves * (x1 - x0), y0 + leaves * (y1 - y0)),
        )

    def marks(self, points: Sequence[tuple[float, float]], kind: str, *, first: int | None = None) -> None:
        """A dot at each point. first: the row of the figure's table that tells of the first; the others follow it."""
        if not points:
            return
        path = "".join(f"M{px(self.x(a))} {px(self.y(b))}h0" for a, b in points)
        rows = "" if first is None else f' data-first="{first}"'
        self.parts.append(f'<path class="marks {kind}" d="{path}"{rows}/>')

    def bar(self, start: float, end: float, top: float, height: float, kind: str, text: str = "",
            row: int | None = None) -> None:  # fmt: skip
        """From `start` to `end` along x, in values; `top` and `height` in pixels. text: within it, if there is room."""
        x, width = self.x(start), max(self.x(end) - self.x(start), 0.0)
        at = "" if row is None else f' data-row="{row}"'
        self.parts.append(f'<rect class="bar {kind}" x="{px(x)}" y="{px(top)}" width="{px(width)}" '
                          f'height="{px(height)}"{at}/>')  # fmt: skip
        if text and width > 6.5 * len(text) + 6:
            self.words(x + 4, top + height / 2 + 4, text, "within")

    def words(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Text at a place in pixels."""
        self.parts.append(f'<text class="{kind}" x="{px(x)}" y="{px(y)}" text-anchor="{anchor}">{escape(text)}</text>')

    def across(self, kind: str, *, x: float | None = None, y: float | None = None) -> None:
        """A line at one value of either axis, from edge to edge."""
        (x0, x1), (y0, y1) = (self.x.low, self.x.high), (self.y.low, self.y.high)
        if x is not None:
            x0 = x1 = x
        if y is not None:
            y0 = y1 = y
        self.line([(x0, y0), (x1, y1)], kind)

    # -- the whole

    def render(self, id: str, *, has_y: bool = True) -> str:
        """has_y: False where bars with names of their own stand in place of the axis."""
        grid = [*self._x_axis(), *(self._y_axis() if has_y else ())]
        return (
            f'<svg viewBox="0 0 {px(WIDTH)} {px(self.height)}" role="img" aria-labelledby="{id}-t {id}-d" '
            f'data-x="{self.x.data}" data-y="{self.y.data}"><title id="{id}-t">{escape(self.title)}</title>'
            f'<desc id="{id}-d">{escape(self.text)}</desc>{"".join(grid)}{"".join(self.parts)}</svg>'
        )

    def _x_axis(self) -> Iterable[str]:
        bottom = self.height - BOTTOM
        for v in self.x.ticks(PER_TICK):
            at = px(self.x(v))
            yield f'<path class="grid" d="M{at} {px(TOP)}V{px(bottom)}"/>'
            yield f'<text x="{at}" y="{px(bottom + 15)}" text-anchor="middle">{short(v)}</text>'
        middle = (self.x.start + self.x.end) / 2
        yield f'<text class="axis" x="{px(middle)}" y="{px(self.height - 6)}" text-anchor="middle">'
        yield f"{escape(self.x.label)}</text>"

    def _y_axis(self) -> Iterable[str]:
        for v in self.y.ticks(34.0):
            at = self.y(v)
            yield f'<path class="grid" d="M{px(LEFT)} {px(at)}H{px(WIDTH - RIGHT)}"/>'
            yield f'<text x="{px(LEFT - 5)}" y="{px(at + 4)}" text-anchor="end">{short(v)}</text>'
        middle = (self.y.start + self.y.end) / 2
        yield f'<text class="axis" x="12" y="{px(middle)}" text-anchor="middle" '
        yield f'transform="rotate(-90 12 {px(middle)})">{escape(self.y.label)}</text>'
