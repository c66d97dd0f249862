"""The table that `kerngen tune` ends with: what each kernel takes of a step, by default and tuned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kerngen.cli.tables import Table, share_bar
from kerngen.tuning.report import SHOWN_CONTEXT, STEP_BATCHES, STEP_CONTEXT

if TYPE_CHECKING:
    from kerngen.tuning.report import Report, Result
    from kerngen.workload.workload import Item, Workload

MOST_ROWS = 9  # of single kernels; those that take least beyond them are one row


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """name: in the table. text: in words. calls: what it launches, and how often."""

    name: str
    text: str
    calls: tuple[tuple[Item, int], ...]


@dataclass(frozen=True, slots=True)
class _Sum:
    """Microseconds of some launches; None where one has no time."""

    default_us: float | None
    tuned_us: float | None

    @property
    def gain(self) -> float | None:
        return self.default_us / self.tuned_us if self.default_us and self.tuned_us else None

    def cells(self) -> tuple[str, str, str]:
        return _time(self.default_us), _time(self.tuned_us), "" if self.gain is None else f"{self.gain:.2f}x"


@dataclass(frozen=True, slots=True)
class _Row:
    """A kernel. step: the first that it has a part in. share: of that one's tuned time, where all of it is known."""

    kernel: str
    problems: str
    num_problems: int
    step: _Step | None
    sum: _Sum
    share: float | None


def tune_table(report: Report, load: Workload, *, whole: bool) -> tuple[Table, list[str]]:
    """The table, and what its times are of. whole: all of the model was tuned, so that shares are of its steps."""
    steps = list(_steps(load))
    rows = list(_rows(report, steps, whole=whole))
    table = Table("", "kernel", ">problems", ">default", ">tuned", ">gain", "of the step's time")
    many = len(rows) > MOST_ROWS + 1
    kept = sorted(rows, key=lambda r: -(r.share or 0.0))[:MOST_ROWS] if many else rows
    for row in (r for r in rows if r in kept):
        table.add_row(row.kernel, row.problems, *row.sum.cells(), _part(row))
    if rest := [r for r in rows if r not in kept]:
        gains = [r.sum.gain for r in rest if r.sum.gain is not None]
        table.add_row(f"{len(rest)} others", str(sum(r.num_problems for r in rest)), "", "",
                      f"{max(gains):.2f}x" if gains else "", _most(rest))  # fmt: skip
    by_key = _by_key(report)
    for batch in STEP_BATCHES if whole else ():
        total = _summed(load.step("decode", batch, STEP_CONTEXT), by_key)
        if total.tuned_us is not None:
            table.add_row(f"step, batch {batch}", "", *total.cells(), "")
    met = dict.fromkeys(r.step for r in rows if r.step is not None)
    return table, [f"{step.name}: {step.text}" for step in met]


def _rows(report: Report, steps: list[_Step], *, whole: bool) -> Iterator[_Row]:
    """In the order of the steps, what takes most of one first; kernels that no step has a part of last."""
    by_key = _by_key(report)
    kernels: dict[str, list[Result]] = {}
    for r in report.results:
        kernels.setdefault(r.item.kernel, []).append(r)
    rows = []
    for kernel, results in kernels.items():
        step = next((s for s in steps if any(i.kernel == kernel for i, _ in s.calls)), None)
        calls = () if step is None else tuple((i, n) for i, n in step.calls if i.kernel == kernel)
        own, all_of_it = _summed(calls, by_key), _summed(() if step is None else step.calls, by_key)
        share = own.tuned_us / all_of_it.tuned_us if whole and own.tuned_us and all_of_it.tuned_us else None
        won = sum(r.winner is not None for r in results)
        problems = str(won) if won == len(results) else f"{won} of {len(results)}"
        rows.append(_Row(kernel, problems, len(results), step, own, share))
    order = {None: len(steps)} | {step: at for at, step in enumerate(steps)}
    yield from sorted(rows, key=lambda r: (order[r.step], -(r.share or 0.0), -(r.sum.tuned_us or 0.0)))


def _steps(load: Workload) -> Iterator[_Step]:
    """Those that may stand for a kernel, in the order of asking."""
    chunk = max((u.chunk for i in load.items for u in i.uses if u.phase == "prefill"), default=0)
    lens = {u.q_len for i in load.items for u in i.uses if u.phase == "verify"}
    kinds = [
        ("decode", f"one token, context {STEP_CONTEXT}", ("decode", 1, STEP_CONTEXT, 1), 0),
        ("prefill", f"of {chunk} tokens", ("prefill", 1, SHOWN_CONTEXT, 1), chunk),
        ("draft", f"one token, context {STEP_CONTEXT}", ("draft", 1, STEP_CONTEXT, 1), 0),
        *(("verify", f"of {n} tokens", ("verify", 1, STEP_CONTEXT, n), 0) for n in sorted(lens)),
        *((f"batch {n}", f"{n} sequences, one token each, context {STEP_CONTEXT}", ("decode", n, STEP_CONTEXT, 1), 0)
          for n in STEP_BATCHES if n > 1),
    ]  # fmt: skip
    for name, text, where, chunk_len in kinds:
        if calls := tuple(load.step(*where, chunk=chunk_len)):
            yield _Step(name, text, calls)


def _by_key(report: Report) -> Mapping[tuple[str, Any], Result]:
    return {(r.item.kernel, r.item.problem): r for r in report.results}


def _summed(calls: Any, by_key: Mapping[tuple[str, Any], Result]) -> _Sum:
    default, tuned = list[float | None](), list[float | None]()
    for item, count in calls:
        r = by_key.get((item.kernel, item.problem))
        us = None if r is None or r.winner is None else r.winner.latency_us
        tuned.append(None if us is None else count * us)
        default.append(None if r is None or not r.default_us else count * r.default_us)
    return _Sum(_total(default), _total(tuned))


def _total(parts: list[float | None]) -> float | None:
    known = [p for p in parts if p is not None]
    return sum(known) if known and len(known) == len(parts) else None


def _part(row: _Row) -> str:
    if row.step is None:
        return ""
    if row.share is None:
        return row.step.name
    return f"{share_bar(row.share):8} {_percent(row.share)} of {row.step.name}"


def _most(rows: list[_Row]) -> str:
    shares = [r.share for r in rows if r.share is not None]
    return f"{'':8} {_percent(max(shares))} at most" if shares else ""


def _percent(share: float) -> str:
    if share < 0.0005:
        return "<.1%"
    return f"{100 * share:3.0f}%" if share >= 0.0995 else f"{100 * share:3.1f}%"


def _time(us: float | None) -> str:
    if us is None:
        return ""
    return f"{us / 1e6:.2f} s" if us >= 1e6 else f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.1f} us"
