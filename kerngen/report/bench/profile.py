"""Figures of `kerngen bench profile`: a step as one bar of kernels against its floor, each kernel, and a roofline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kerngen.report.bench import against
from kerngen.report.bench.bars import Bars
from kerngen.report.bench.roofline import Dot, roofline
from kerngen.report.bench.runs import Run, limits_of, number, text, time
from kerngen.report.figure import (
    MICROSECONDS,
    Figure,
    Section,
    Table,
    colour,
    digits,
    microseconds,
    percent,
    us,
    words,
)
from kerngen.report.figure import number as counted
from kerngen.report.svg import BOTTOM, NUM_COLOURS, RIGHT, TOP, WIDTH, Plot, Scale
from kerngen.workload.steps import Step

BAR = 30.0  # pixels
NAMES = 58.0
LEAST = 0.002  # of the step: what takes less is one piece of its bar


@dataclass(frozen=True, slots=True)
class Row:
    kernel: str
    launches: float
    us: float
    bytes: float
    flops: float
    floor_us: float

    @property
    def name(self) -> str:
        """Of torch's kernels without the namespaces."""
        return self.kernel.rpartition("::")[2]


def rows_of(run: Run) -> list[Row]:
    return [
        Row(text(r["kernel"]), number(r["launches"]), number(r["moved_us"]), number(r["bytes"]), number(r["flops"]),
            number(r["floor_us"]))
        for r in run["rows"]
    ]  # fmt: skip


def step_of(run: Run) -> Step:
    return Step(**run["step"])


def title(run: Run) -> str:
    return f"{text(run['model'])}, {step_of(run).name}"


def sections(run: Run, last: Run | None) -> list[Section]:
    """last: of the same step."""
    rows, then = rows_of(run), [] if last is None else rows_of(last)
    dots = [Dot(r.kernel, r.kernel, r.us, r.bytes, r.flops) for r in rows if r.us]
    found = roofline("roofline-0", "Roofline", dots, limits_of(run))
    drawn = [_bar(run, rows, last, then), _kernels(rows, time(run["step_us"]))] if rows else []
    figures = (*drawn, *([] if found is None else [found]))
    return [
        Section(
            "step", "The step against its floor",
            "Launches overlap: a kernel's time is by how much its launches move the step's end. Its floor is what the "
            f"bytes that they must move take at the measured read rate. {limits_of(run).sentence()}",
            figures, "Nothing ran.",
        ),
        against.section(run, last, _against(rows, then)),
    ]  # fmt: skip


def _bar(run: Run, rows: list[Row], last: Run | None, then: list[Row]) -> Figure:
    """Kernels from left to right, what takes most first, in the same colours in each of the bars."""
    whole, floor = time(run["step_us"]), sum(r.floor_us for r in rows)
    before = 0.0 if last is None else time(last["step_us"])
    longest = max(whole, floor, before)
    unit, per = ("ms", 1e3) if longest >= 1e3 else (MICROSECONDS, 1.0)
    said = f"{digits(whole / per, 4)} {unit}, of which the floor is {digits(floor / per, 4)} {unit}"
    said += f" ({100 * floor / whole:.0f} %)."
    if last is not None:
        said += f" The last run took {digits(before / per, 4)} {unit}."
    kinds = {r.kernel: colour(min(at, NUM_COLOURS - 1)) for at, r in enumerate(rows)}
    table = Table((
        words("kernel"), counted("launches"), microseconds("time"), microseconds("floor"), counted("of the step", "%"),
        counted("floor, of its time", "%"), counted("must move", "MB"),
    ))  # fmt: skip
    for r in rows:
        least = (us(r.floor_us), percent(r.floor_us / r.us) if r.us else "", f"{r.bytes / 1e6:.1f}")
        floor_cell, share, size = least if r.bytes else ("", "", "")
        table.add(r.kernel, f"{r.launches:.1f}", us(r.us), floor_cell, percent(r.us / whole), share, size)
    lines = [
        ("step", [(r.kernel, r.us) for r in rows], ""),
        ("floor", [(r.kernel, r.floor_us) for r in rows], " floor"),
    ]
    if last is not None:
        lines.append(("last run", [(r.kernel, r.us) for r in then], " floor"))
    height = TOP + len(lines) * (BAR + 8) + BOTTOM
    plot = Plot("The step", said, Scale("time", unit, 0.0, longest / per * 1.01, NAMES, WIDTH - RIGHT),
                Scale("bars", "none", 0.0, 1.0, height - BOTTOM, TOP), height)  # fmt: skip
    order = {r.kernel: at for at, r in enumerate(rows)}
    for i, (name, parts, how) in enumerate(lines):
        top, at = TOP + 4 + i * (BAR + 8), 0.0
        plot.words(NAMES - 6, top + BAR / 2 + 4, name, anchor="end")
        for kernel, part_us in sorted(parts, key=lambda p: order.get(p[0], len(order))):
            kind = kinds.get(kernel, colour(NUM_COLOURS - 1))
            plot.bar(
                at,
                at + part_us / per,
                top,
                BAR,
                f"{kind}{how}",
                "" if how else kernel.rpartition("::")[2],
                order.get(kernel),
            )
            at += part_us / per
    legend = tuple((kinds[r.kernel], r.name) for r in rows if r.us >= LEAST * whole)
    return Figure("step-0", "The step", said, plot.render("step-0", has_y=False), table, legend=legend)


def _kernels(rows: list[Row], whole: float) -> Figure:
    """Time above, floor below; the difference is what there is to gain."""
    shown = [r for r in rows if r.us >= LEAST * whole]
    most = max(shown, key=lambda r: r.us - r.floor_us)
    said = (f"{most.name} has most above its floor: {us(most.us - most.floor_us)} of {us(most.us)} {MICROSECONDS}. "
            f"What takes less than {100 * LEAST:.1f} % of the step is left out.")  # fmt: skip
    table = Table((words("kernel"), microseconds("time"), microseconds("floor"), microseconds("above the floor")))
    bars = Bars("Kernel by kernel", said, ("of the step", MICROSECONDS, 0.0, max(max(r.us, r.floor_us) for r in shown)),
                len(shown), 2)  # fmt: skip
    for at, r in enumerate(shown):
        kind = colour(min(at, NUM_COLOURS - 1))
        row = table.add(r.kernel, us(r.us), us(r.floor_us) if r.bytes else "", us(max(r.us - r.floor_us, 0.0)))
        bars.begin(f"{r.name}, {r.launches:g} launches")
        bars.bar(0.0, r.us, kind, row=row)
        bars.plot.words(bars.plot.x.end + 4, bars.value_y(), us(r.us))
        if r.bytes:
            bars.bar(0.0, r.floor_us, f"{kind} floor", 1, row=row)
            bars.plot.words(bars.plot.x.end + 4, bars.value_y(1), us(r.floor_us))
    return Figure("kernels-0", "Kernel by kernel", said, bars.render("kernels-0"), table)


def _against(rows: list[Row], last: list[Row]) -> Iterator[Figure]:
    """Of those that take a part of the step that can be seen."""
    least = LEAST * sum(r.us for r in rows)
    sides = [[against.once(r.kernel, r.us) for r in side if r.us >= least] for side in (rows, last)]
    if pairs := against.pairs_of(*sides):
        yield against.figure("against-0", "Kernel by kernel", pairs, MICROSECONDS)
