"""Prediction files: predicted winners of one kernel on one board as text.

    kerngen-outlook 1 attn_decode sm70 V100
    board {"arch":"sm70","clock_mhz":1530,…}
    predicted roofline-5 nvrtc 12.9

    problem dtype=fp16 head_dim=256 page_size=64
     a @a91f03c2b7d0
     b block_n=32 num_splits=4 @0c3fb1a2d4e5
     batch=1 | kv_len 64=3.412a 512=4.02a 2048=7.771b
     batch=2 | kv_len 64=3.45a 512=5.6b

A problem has its compiled-in fields; under it are the configurations that win somewhere, each with a letter and the
first digits of its source's SHA-256, and then, by the bucketed fields, the tuned points of the kernel's dynamic one: at
each the time in microseconds, and who wins. Fields that have their default are left out; a point whose problem had
others than the line says has a line of its own, which ends in `as` and that problem. There are no rivals, for the model
would say the same of them again, and nothing here can be called measured: text.py is the form for that.

`parse(dump(x)) == x`; and what `parse` takes, `dump` writes again, to the letter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from string import ascii_lowercase
from typing import Any

from kerngen.errors import DatabaseError
from kerngen.tuning_db.dist.fields_text import (
    NAME,
    SOURCE,
    Line,
    as_json,
    as_object,
    number,
    pairs,
    read_lines,
    require_as_written,
    word,
)

VERSION = 1
HEAD = "kerngen-outlook"
_LETTERS = re.compile(r"[a-z]+")


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration, and the first digits of the SHA-256 of its source."""

    config: Mapping[str, Any]
    source: str


@dataclass(frozen=True, slots=True)
class Point:
    """A tuned point. dynamic: None for a kernel that has no such field. plan: index of what wins. fields: the problem,
    where it is not what the sheet says of it.
    """

    dynamic: int | None
    us: float
    plan: int
    fields: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    runtime: Mapping[str, Any]
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """All that has the same compiled-in fields."""

    static: Mapping[str, Any]
    plans: tuple[Plan, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class PredictionFile:
    """One kernel on one board. device: the fields of its Device. dynamic: the dynamic field's name, "" for none.

    model: the cost model's. nvrtc: what compiled the kernels that it was asked about.
    """

    kernel: str
    arch: str
    board: str
    device: Mapping[str, Any]
    model: str
    nvrtc: tuple[int, int]
    dynamic: str
    families: tuple[Family, ...]


def rounded(us: float) -> float:
    """As outlooks have times: four digits, which is finer than any prediction."""
    return float(f"{us:.4g}")


def label(index: int) -> str:
    """a, b, … z, aa, ab, …"""
    text = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, 26)
        text = ascii_lowercase[letter] + text
    return text


# ---- writing


def dump(outlook: PredictionFile) -> str:
    o = outlook
    lines = [
        f"{HEAD} {VERSION} {' '.join(map(word, (o.kernel, o.arch, o.board)))}",
        f"board {as_json(o.device)}",
        f"predicted {word(o.model)} nvrtc {o.nvrtc[0]}.{o.nvrtc[1]}",
    ]
    for family in o.families:
        lines += ["", " ".join(["problem", *pairs(family.static)])]
        for i, plan in enumerate(family.plans):
            lines.append(" " + " ".join([label(i), *pairs(plan.config), f"@{plan.source}"]))
        for cell in family.cells:
            lines += _cell_lines(cell, o.dynamic)
    return "\n".join(lines) + "\n"


def _cell_lines(cell: Cell, dynamic: str) -> Iterator[str]:
    head = " " + " ".join([*pairs(cell.runtime), "|"])
    for own, points in groupby(enumerate(cell.points), lambda p: None if p[1].fields is None else p[0]):
        told = [point for _, point in points]
        at = ["" if p.dynamic is None else f"{p.dynamic}=" for p in told]
        words = [f"{a}{number(p.us)}{label(p.plan)}" for a, p in zip(at, told, strict=True)]
        named = [dynamic] if any(at) else ["point"]
        yield " ".join([head, *named, *words]) + ("" if own is None else f" as {as_json(told[0].fields)}")


# ---- reading


def parse(text: str, where: str = "text") -> PredictionFile:
    """The outlook that `text` is. where: its name, for messages.

    Raises DatabaseError, naming the line, for whatever `dump` would not write just so.
    """
    reading = _Reading()
    read_lines(text, where, reading.take)
    found = reading.outlook(where)
    require_as_written(text, dump(found), where)
    return found


class _Reading:
    """An outlook, as far as its lines were read."""

    def __init__(self) -> None:
        self.names: tuple[str, str, str] | None = None
        self.device: dict[str, Any] | None = None
        self.by: tuple[str, tuple[int, int]] | None = None
        self.dynamic = ""
        self.families: list[tuple[dict[str, Any], list[Plan], list[tuple[dict[str, Any], list[Point]]]]] = []

    def take(self, at: int, text: str) -> None:
        line = Line(text)
        if at == 1:
            line.expect(f"{HEAD} ")
            if (version := line.whole()) != VERSION:
                raise ValueError(f"it is of version {version}; this kerngen reads {VERSION}")
            kernel, arch, board = (line.text_value(what, after=" ") for what in ("a kernel", "an arch", "a board"))
            self.names = kernel, arch, board
        elif at == 2:
            line.expect("board ")
            self.device = as_object(line.json())
        elif at == 3:
            line.expect("predicted ")
            if not (model := line.text_value("a cost model")):
                raise ValueError("a prediction names its model")
            line.expect(" nvrtc ")
            major = line.whole()
            line.expect(".")
            self.by = model, (major, line.whole())
        elif line.take("problem"):
            static = line.pairs("") if line.take(" ") else {}
            self.families.append((static, [], []))
        elif line.take(" "):
            self._within(line)
        line.end()

    def outlook(self, where: str) -> PredictionFile:
        if self.names is None or self.device is None or self.by is None:
            raise DatabaseError(f"{where} is no outlook: it does not say of which board, or by which model")
        families = tuple(
            Family(static, tuple(plans), tuple(Cell(runtime, tuple(points)) for runtime, points in cells))
            for static, plans, cells in self.families
        )
        return PredictionFile(*self.names, self.device, *self.by, self.dynamic, families)

    def _within(self, line: Line) -> None:
        """A configuration, or points of a cell."""
        if not self.families:
            raise ValueError("it stands before any problem")
        _, plans, cells = self.families[-1]
        if not cells and line.take(f"{label(len(plans))} "):
            config = line.pairs("@")
            line.expect("@")
            plans.append(Plan(config, line.word(SOURCE, "the source's digest")))
            return
        runtime = line.pairs("|")
        line.expect("| ")
        points, alone = self._points(line, len(plans))
        if cells and cells[-1][0] == runtime and (alone or cells[-1][1][-1].fields is not None):
            cells[-1][1].extend(points)  # one that is said whole has a line of its own
            return
        if any(known == runtime for known, _ in cells):
            raise ValueError("these fields are said twice")
        cells.append((runtime, points))

    def _points(self, line: Line, plans: int) -> tuple[list[Point], bool]:
        """Those of a line, and whether it says the problem whole."""
        name, points = line.word(NAME, "the dynamic field"), list[Point]()
        if name == "point":
            name = ""
        if name != (self.dynamic or name):
            raise ValueError(f"the dynamic field is {self.dynamic}, not {name}")
        self.dynamic = name
        labels = {label(i): i for i in range(plans)}
        while line.take(" ") and not line.take("as "):
            dynamic = None
            if name:
                dynamic = line.whole()
                line.expect("=")
            us = line.number()
            if not 0 < us < float("inf"):
                raise ValueError(f"{us} us is no time")
            if (which := line.word(_LETTERS, "a configuration")) not in labels:
                raise ValueError(f"there is no configuration {which}")
            points.append(Point(dynamic, us, labels[which]))
        if line.at == len(line.text):
            if not points:
                raise ValueError("it has no point")
            return points, False
        if len(points) != 1:
            raise ValueError("one point is said whole in a line")
        return [Point(points[0].dynamic, points[0].us, points[0].plan, as_object(line.json()))], True
