"""Figures of `kerngen bench step`: what the steps take with one database's winners, over another's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kerngen.report.bench import against
from kerngen.report.bench.bars import Bars
from kerngen.report.bench.runs import Run, limits_of, number, text, time
from kerngen.report.figure import Figure, Section, Table, ratio, words
from kerngen.report.figure import number as counted
from kerngen.report.svg import spread


@dataclass(frozen=True, slots=True)
class Row:
    """A step. ratios: of each other contender to the first, with its spread; tuned: of `calls` problems."""

    name: str
    base_ms: float
    weight: float
    ratios: Mapping[str, tuple[float, float]]
    tuned: Mapping[str, float]
    calls: float


def rows_of(run: Run) -> list[Row]:
    return [
        Row(text(r["name"]), time(r["base_us"]) / 1e3, number(r["weight"]),
            {name: (time(v["median"]), number(v["spread"])) for name, v in r["ratios"].items()},
            {name: number(v) for name, v in r["num_tuned"].items()}, number(r["num_calls"]))
        for r in run["steps"]
    ]  # fmt: skip


def title(run: Run) -> str:
    return f"{text(run['model'])}: {', '.join(map(text, run['contenders']))}"


def sections(run: Run, last: Run | None) -> list[Section]:
    rows, base = rows_of(run), text(run["contenders"][0])
    return [
        Section(
            "steps", "The steps, run in turn",
            f"What each step takes with the winners of a database, over what it takes with those of {base}; lines are "
            f"the median's spread. {limits_of(run).sentence()}",
            tuple(_figures(rows, base, run["means"])), "This model takes none of these steps.",
        ),
        against.section(run, last, () if last is None else _against(run, last)),
    ]  # fmt: skip


def _figures(rows: list[Row], base: str, means: Mapping[str, float]) -> Iterator[Figure]:
    for i, (name, mean) in enumerate(means.items()):
        said = f"{time(mean):.4f} of the time with {base}, by the steps' weight."
        table = Table((
            words("step"), counted(f"with {base}", "ms"), counted("time over that"), counted("spread"),
            counted("weight"), counted("tuned of its problems"), counted("problems"),
        ))  # fmt: skip
        values = [v for r in rows for m, s in [r.ratios[name]] for v in (m - s, m + s)]
        low, high = spread([*values, 0.98, 1.02], is_log=False)
        bars = Bars(name, said, (f"time over that with {base}", "times", low, high), len(rows))
        bars.plot.across("one", x=1.0)
        for r in rows:
            middle, wide = r.ratios[name]
            row = table.add(r.name, f"{r.base_ms:.3f}", f"{middle:.4f}", f"{wide:.4f}", ratio(r.weight),
                            f"{r.tuned[name]:.0f}", f"{r.calls:.0f}")  # fmt: skip
            kind = against.SAME if abs(middle - 1) <= wide else against.FASTER if middle < 1 else against.SLOWER
            bars.begin(f"{r.name} ({r.base_ms:.3f} ms)")
            bars.bar(1.0, middle, kind, row=row)
            bars.range(middle - wide, middle + wide)
            bars.plot.words(bars.plot.x.end + 4, bars.value_y(), f"{middle:.4f}")
        legend = *against.LEGEND[:2], (against.SAME, "within the spread")
        yield Figure(f"steps-{i}", name, said, bars.render(f"steps-{i}"), table, legend=legend)


def _against(run: Run, last: Run) -> list[Figure]:
    """Of the contenders that both runs have, by name."""

    def timed(of: Run, contender: str) -> list[against.Timed]:
        is_first = of["contenders"][0] == contender
        return [against.once(r.name, r.base_ms * (1.0 if is_first else r.ratios[contender][0])) for r in rows_of(of)]

    found = list[Figure]()
    for contender in run["contenders"]:
        if contender in last["contenders"]:
            pairs = against.pairs_of(timed(run, contender), timed(last, contender))
            if pairs:
                found.append(against.figure(f"against-{len(found)}", contender, pairs, "ms"))
    return found
