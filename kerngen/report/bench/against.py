"""Two runs side by side: what became faster, what became slower, and what stayed within their spread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kerngen.report.bench.bars import Bars
from kerngen.report.bench.runs import Run, gpu_of, when
from kerngen.report.figure import Figure, Section, Table, geometric_mean, number, ratio, us, words
from kerngen.report.svg import spread

FASTER, SLOWER, SAME = "s2", "s6", "s7"
LEGEND = (FASTER, "faster"), (SLOWER, "slower"), (SAME, "within the spread of both runs")
NEAR = 0.01  # of a time that was measured once, what counts as the same


@dataclass(frozen=True, slots=True)
class Timed:
    """What was timed: its name, its time and between which it lay, in the unit of its figure."""

    name: str
    time: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Pair:
    now: Timed
    then: Timed

    @property
    def faster(self) -> float:
        """The last run's time over this one's."""
        return self.then.time / self.now.time

    @property
    def kind(self) -> str:
        if self.now.low <= self.then.high and self.then.low <= self.now.high:
            return SAME
        return FASTER if self.faster > 1 else SLOWER


def once(name: str, time: float) -> Timed:
    """What has no spread of its own."""
    return Timed(name, time, time * (1 - NEAR / 2), time * (1 + NEAR / 2))


def pairs_of(now: Iterable[Timed], then: Iterable[Timed]) -> list[Pair]:
    """Those that both runs have, in the order of this one."""
    before = {t.name: t for t in then}
    return [Pair(t, before[t.name]) for t in now if t.name in before]


def section(run: Run, last: Run | None, figures: Iterable[Figure]) -> Section:
    """What it says of the last run, and `figures`; how to have one where there is none."""
    if last is None:
        how = "No other run was given: --against FILE takes a page such as this, or what --json printed."
        return Section(
            "against", "Against the last run", "Another run of the same command tells what changed.", (), how
        )
    text = f"The run of {when(last)}, kerngen {last.get('kerngen', 'of unknown version')}, on {gpu_of(last)}."
    if gpu_of(last) != gpu_of(run):
        text += f" This one is on {gpu_of(run)}: times of two kinds of GPU differ by more than kerngen."
    return Section("against", "Against the last run", text, tuple(figures), "The two runs have nothing in common.")


def figure(id: str, title: str, pairs: Sequence[Pair], unit: str) -> Figure:
    """A row a thing: how many times as fast as in the last run. unit: of the times in its table."""
    mean = geometric_mean([p.faster for p in pairs])
    counts = [sum(p.kind == kind for p in pairs) for kind in (FASTER, SLOWER, SAME)]
    text = (f"{len(pairs)} in both runs: {counts[0]} faster, {counts[1]} slower, {counts[2]} the same within the "
            f"spread; all together {mean:.3f} times as fast.")  # fmt: skip
    table = Table(
        (words("what"), number("last run", unit), number("this run", unit), number("times as fast"), words(""))
    )
    low, high = spread([*(p.faster for p in pairs), 0.98, 1.02], is_log=True)
    bars = Bars(title, text, ("last run's time over this one's", "times", low, high), len(pairs), is_log=True)
    bars.plot.across("one", x=1.0)
    said = dict(LEGEND)
    for p in pairs:
        row = table.add(p.now.name, us(p.then.time), us(p.now.time), ratio(p.faster), said[p.kind])
        bars.begin(p.now.name)
        bars.bar(1.0, p.faster, p.kind, row=row)
        bars.plot.words(bars.plot.x.end + 4, bars.value_y(), f"{p.faster:.3f}")
    return Figure(id, title, text, bars.render(id), table, legend=LEGEND)
