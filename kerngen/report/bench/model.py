"""Figures of `kerngen bench model`: a step against the bytes that it must read, and prefill."""

from __future__ import annotations

from dataclasses import dataclass

from kerngen.report.bench import against
from kerngen.report.bench.bars import Bars
from kerngen.report.bench.runs import Run, limits_of, number, text, time
from kerngen.report.figure import Figure, Section, Table, colour, duration, ratio, words
from kerngen.report.figure import number as counted


@dataclass(frozen=True, slots=True)
class Row:
    """A context. floor_ms: 0 where no read rate was measured. tokens: of a sequence in a step."""

    context: int
    batch: int
    step_ms: float
    least_ms: float
    most_ms: float
    floor_ms: float
    prefill_ms: float
    tokens: float

    @property
    def name(self) -> str:
        return f"context {self.context:,}" + (f", batch {self.batch}" if self.batch > 1 else "")


def rows_of(run: Run) -> list[Row]:
    return [
        Row(int(number(r["context"])), int(number(r["batch"])), time(r["step_ms"]), number(r["step_ms_min"]),
            number(r["step_ms_max"]), number(r["floor_ms"]), time(r["prefill_ms"]), number(r["acceptance_length"]))
        for r in run["rows"]
    ]  # fmt: skip


def title(run: Run) -> str:
    return text(run["model"])


def sections(run: Run, last: Run | None) -> list[Section]:
    rows = rows_of(run)
    how = f"{text(run['backend'])} backend, {text(run['dtype'])}"
    return [
        Section(
            "steps", "A step and a prefill",
            f"Medians of several generations with generated weights ({how}); the line is from the least to the most. A "
            "step's floor is what it must read, weights, keys and values, at the measured read rate. "
            f"{limits_of(run).sentence()}",
            (_steps(rows), _prefills(rows)), "Nothing was timed.",
        ),
        against.section(run, last, () if last is None else _against(rows, rows_of(last))),
    ]  # fmt: skip


def _steps(rows: list[Row]) -> Figure:
    has_floor = any(r.floor_ms for r in rows)
    table = Table((
        words("where"), counted("step", "ms"), counted("least", "ms"), counted("most", "ms"), counted("floor", "ms"),
        counted("floor over step"), counted("tokens a step"),
    ))  # fmt: skip
    best = min(rows, key=lambda r: r.step_ms)
    said = f"{duration(1e3 * best.step_ms)} a step at the least, at {best.name}."
    if has_floor:
        said += f" The floor is {100 * best.floor_ms / best.step_ms:.0f} % of that."
    bars = Bars("A decode step", said, ("time of a step", "ms", 0.0, max(r.most_ms for r in rows)), len(rows),
                2 if has_floor else 1)  # fmt: skip
    for r in rows:
        row = table.add(r.name, f"{r.step_ms:.3f}", f"{r.least_ms:.3f}", f"{r.most_ms:.3f}",
                        f"{r.floor_ms:.3f}" if has_floor else "", ratio(r.floor_ms / r.step_ms) if has_floor else "",
                        f"{r.tokens:.2f}")  # fmt: skip
        bars.begin(r.name)
        bars.bar(0.0, r.step_ms, colour(0), row=row)
        bars.range(r.least_ms, r.most_ms)
        bars.plot.words(bars.plot.x.end + 4, bars.value_y(), f"{r.step_ms:.3f}")
        if has_floor:
            bars.bar(0.0, r.floor_ms, f"{colour(0)} floor", 1, row=row)
            bars.plot.words(bars.plot.x.end + 4, bars.value_y(1), f"{r.floor_ms:.3f}")
    legend = ((colour(0), "step"), (f"{colour(0)} floor", "floor")) if has_floor else ()
    return Figure("step-0", "A decode step", said, bars.render("step-0"), table, legend=legend)


def _prefills(rows: list[Row]) -> Figure:
    table = Table((words("where"), counted("prefill", "ms"), counted("tokens a second")))
    rates = {r: 1e3 * r.context * r.batch / r.prefill_ms for r in rows}
    said = f"{max(rates.values()):,.0f} tokens a second at the most."
    bars = Bars("Prefill", said, ("prompt tokens a second", "tokens/s", 0.0, max(rates.values())), len(rows))
    for r, rate in rates.items():
        row = table.add(r.name, f"{r.prefill_ms:.1f}", f"{rate:.0f}")
        bars.begin(r.name)
        bars.bar(0.0, rate, colour(1), row=row)
        bars.plot.words(bars.plot.x.end + 4, bars.value_y(), duration(1e3 * r.prefill_ms))
    return Figure("prefill-0", "Prefill", said, bars.render("prefill-0"), table)


def _against(rows: list[Row], last: list[Row]) -> list[Figure]:
    steps = [[against.Timed(r.name, r.step_ms, r.least_ms, r.most_ms) for r in side] for side in (rows, last)]
    prefills = [[against.once(r.name, r.prefill_ms) for r in side] for side in (rows, last)]
    found = list[Figure]()
    for name, (now, then) in (("A decode step", steps), ("Prefill", prefills)):
        if pairs := against.pairs_of(now, then):
            found.append(against.figure(f"against-{len(found)}", name, pairs, "ms"))
    return found
