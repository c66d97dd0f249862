"""Figures of `kerngen bench kernel`: each case against this GPU's limits, beside what was timed with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kerngen.report.bench import against
from kerngen.report.bench.bars import Bars
from kerngen.report.bench.roofline import Dot, roofline
from kerngen.report.bench.runs import Run, limits_of, number, text, time
from kerngen.report.figure import Figure, Section, Table, colour, digits, duration, microseconds, percent, us, words
from kerngen.report.figure import number as counted


@dataclass(frozen=True, slots=True)
class Row:
    """A case that was timed. share: of its time, what its floor takes. beside: of baselines and peers, by name."""

    kernel: str
    case: str
    us: float
    p10_us: float
    p90_us: float
    gbps: float
    tflops: float
    share: float
    beside: Mapping[str, float]

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.case}"


def rows_of(run: Run) -> list[Row]:
    """Those that did not fail."""
    return [
        Row(text(r["kernel"]), text(r["case"]), time(r["p50_us"]), number(r["p10_us"]), number(r["p90_us"]),
            number(r["gbps"]), number(r["tflops"]), max(number(r["share_read"]), number(r["share_matmul"])),
            {n.removeprefix("baseline_").removesuffix("_us"): time(v) for n, v in r.items()
             if n.startswith("baseline_") and not isinstance(v, str)})
        for r in run["rows"] if "error" not in r
    ]  # fmt: skip


def title(run: Run) -> str:
    kernels = list(dict.fromkeys(text(r["kernel"]) for r in run["rows"]))
    return f"{', '.join(kernels)}" if len(kernels) <= 3 else f"{len(kernels)} kernels"


def sections(run: Run, last: Run | None) -> list[Section]:
    rows = rows_of(run)
    dots = [Dot(r.kernel, r.name, r.us, r.gbps * r.us * 1e3, r.tflops * r.us * 1e6) for r in rows]
    found = roofline("roofline-0", "All cases", dots, limits_of(run))
    failed = [f"{r['kernel']} {r['case']}" for r in run["rows"] if "error" in r]
    return [
        Section(
            "limits", "Each case against the limits",
            "What its bytes take at the measured read rate, or its FLOPs at the measured matmul rate, if that is more, "
            f"as a part of the case's time. {limits_of(run).sentence()}"
            + (f" Failed: {', '.join(failed)}." if failed else ""),
            tuple(_limits(rows)), "No case was timed.",
        ),
        Section(
            "roofline", "Roofline", "Every case at its FLOPs a byte, under what this GPU was measured to do.",
            () if found is None else (found,), "No case has FLOPs to count.",
        ),
        against.section(run, last, () if last is None else _against(rows, rows_of(last))),
    ]  # fmt: skip


def _limits(rows: list[Row]) -> Iterator[Figure]:
    names = list(dict.fromkeys(name for r in rows for name in r.beside))
    colours = {name: colour(1 + at % 8) for at, name in enumerate(names)}
    for i, (kernel, here) in enumerate(_by_kernel(rows).items()):
        beside = [name for name in names if any(name in r.beside for r in here)]
        table = Table((words("case"), microseconds("time"), microseconds("p10"), microseconds("p90"),
                       counted("floor, of it", "%"), counted("", "GB/s"), counted("", "TFLOP/s"),
                       *map(microseconds, beside)))  # fmt: skip
        least, most = min(here, key=lambda r: r.share), max(here, key=lambda r: r.share)
        said = f"{percent(most.share)} % of the limit ({most.case})."
        if len(here) > 1:
            said = f"{len(here)} cases, from {percent(least.share)} % of the limit ({least.case}) to {said}"
        high = max([1.0, *(r.share * max(1.0, *(r.us / v for v in r.beside.values()), 1.0) for r in here)])
        bars = Bars(kernel, said, ("floor, of the time", "%", 0.0, 100 * high), len(here), 1)
        bars.plot.across("bound", x=100.0)
        for r in here:
            row = table.add(r.case, us(r.us), us(r.p10_us), us(r.p90_us), percent(r.share), f"{r.gbps:.0f}",
                            digits(r.tflops, 4), *(us(r.beside.get(name)) for name in beside))  # fmt: skip
            bars.begin(r.case)
            bars.bar(0.0, 100 * r.share, colour(0), row=row)
            bars.plot.words(bars.plot.x.end + 4, bars.value_y(), duration(r.us))
            for name, other in r.beside.items():
                bars.marks([100 * r.share * r.us / other], colours[name])
        legend = ((colour(0), "kerngen"), *((colours[name], name) for name in beside))
        yield Figure(f"limits-{i}", kernel, said, bars.render(f"limits-{i}"), table, legend=legend)


def _against(rows: list[Row], last: list[Row]) -> Iterator[Figure]:
    def timed(here: list[Row]) -> list[against.Timed]:
        return [against.Timed(r.case, r.us, r.p10_us, r.p90_us) for r in here]

    before = _by_kernel(last)
    for i, (kernel, here) in enumerate(_by_kernel(rows).items()):
        if pairs := against.pairs_of(timed(here), timed(before.get(kernel, []))):
            yield against.figure(f"against-{i}", kernel, pairs, "µs")


def _by_kernel(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for r in rows:
        found.setdefault(r.kernel, []).append(r)
    return found
