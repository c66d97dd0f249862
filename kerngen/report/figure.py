"""A figure: an SVG, a sentence that describes it, and the table of the numbers behind it.

Every number is a database's, or follows from it by what its column says: a floor, a ratio, today's prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import TypeVar

from kerngen.arch import Device
from kerngen.report.data import Point, Search, Trial
from kerngen.report.svg import NUM_COLOURS

MOST_ROWS = 1000  # of a table that tells of single trials: the page stays one that a phone opens
MICROSECONDS = "µs"


@dataclass(frozen=True, slots=True)
class Column:
    """unit: "" for words and ratios. is_number: set to the right, sorted as numbers."""

    name: str
    unit: str = ""
    is_number: bool = False


@dataclass(slots=True)
class Table:
    """num_left_out: rows that it would have beyond MOST_ROWS."""

    columns: tuple[Column, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    num_left_out: int = 0

    def add(self, *cells: str) -> int:
        """Another row; returns its number."""
        if len(cells) != len(self.columns):
            raise TypeError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)
        return len(self.rows) - 1


@dataclass(frozen=True, slots=True)
class Figure:
    """id: unique on the page. kernel, device: what the page can be narrowed to; "" for all. legend: class, words."""

    id: str
    title: str
    text: str
    svg: str
    table: Table
    kernel: str = ""
    device: str = ""
    legend: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """empty: said in place of figures, where there are none."""

    id: str
    title: str
    text: str
    figures: tuple[Figure, ...]
    empty: str


def words(name: str) -> Column:
    return Column(name)


def number(name: str, unit: str = "") -> Column:
    return Column(name, unit, True)


def microseconds(name: str) -> Column:
    return Column(name, MICROSECONDS, True)


def us(value: float | None) -> str:
    """Microseconds to four digits at least, as all cells have them."""
    return "" if value is None else f"{value:#.4g}".removesuffix(".") if value < 1000 else f"{value:.0f}"


def duration(value_us: float) -> str:
    """Microseconds for a sentence: three digits in the unit that a person would take. 3.6 s, never 3.6e+03 ms."""
    unit, per = unit_of(value_us)
    return f"{digits(value_us / per)} {unit}"


def unit_of(value_us: float) -> tuple[str, float]:
    """The unit for it, and how many microseconds that has."""
    return next(((u, p) for u, p in (("s", 1e6), ("ms", 1e3)) if value_us >= 0.9995 * p), (MICROSECONDS, 1.0))


def digits(value: float, count: int = 3) -> str:
    """`count` digits, or all of a larger whole: never a power of ten."""
    return f"{value:.{count}g}" if abs(value) < 10**count - 0.5 else f"{value:.0f}"


def ratio(value: float) -> str:
    return f"{value:.3f}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def geometric_mean(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def device_name(d: Device) -> str:
    return f"{d.name} ({d.arch}, {d.num_sms} SMs)"


def colour(at: int) -> str:
    return f"s{at % NUM_COLOURS}"


_Row = TypeVar("_Row", Point, Trial, Search)


def by_kernel_and_device(rows: Iterable[_Row]) -> Iterator[tuple[str, Device, list[_Row]]]:
    found: dict[tuple[str, Device], list[_Row]] = {}
    for row in rows:
        found.setdefault((row.place.kernel, row.place.device), []).append(row)
    for (kernel, device), members in found.items():
        yield kernel, device, members
