"""Compares the winners of two databases, point by point."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kerngen.tuning_db.read.values import Winner


@dataclass(frozen=True, slots=True)
class Change:
    """One tuned point on one board. before, after: None where it has no winner.

    percent: by how much longer the new one takes; None unless both were measured, or predicted by whatever model: a
    prediction and a measurement do not compare, and what is carried has no time.
    """

    before: Winner | None
    after: Winner | None

    @property
    def here(self) -> Winner:
        """The one that there is; the new one of two."""
        found = self.after or self.before
        if found is None:
            raise ValueError("a change has a winner at least")
        return found

    @property
    def kind(self) -> str:
        """new, gone, config or time."""
        if self.before is None or self.after is None:
            return "new" if self.before is None else "gone"
        return "config" if self.before.config != self.after.config else "time"

    @property
    def provenance(self) -> str:
        """As "measured", or "predicted -> measured"."""
        sides = [w.provenance for w in (self.before, self.after) if w is not None]
        return " -> ".join(dict.fromkeys(sides))

    @property
    def percent(self) -> float | None:
        if self.before is None or self.after is None or self.before.provenance != self.after.provenance:
            return None
        if self.before.latency_us is None or self.after.latency_us is None:
            return None
        return (self.after.latency_us / self.before.latency_us - 1) * 100


def diff(before: Iterable[Winner], after: Iterable[Winner]) -> tuple[list[Change], int]:
    """(what changed, how many points are the same): in configuration, provenance or time, or that come or went."""
    old, new = _by_point(before), _by_point(after)
    changes, same = [], 0
    for point in sorted(old.keys() | new.keys()):
        a, b = old.get(point), new.get(point)
        if a is not None and b is not None and _stated(a) == _stated(b):
            same += 1
        else:
            changes.append(Change(a, b))
    return changes, same


def _by_point(winners: Iterable[Winner]) -> dict[tuple[str, str, str, int, str, int, str], Winner]:
    """The first of each, as databases are asked in their order."""
    found: dict[tuple[str, str, str, int, str, int, str], Winner] = {}
    for w in winners:
        at = w.problem.dynamic or 0
        key = (w.kernel, w.arch.name, w.device.name, w.device.num_sms, w.problem.cell, at, w.problem.id)
        found.setdefault(key, w)
    return found


def _stated(w: Winner) -> tuple[object, ...]:
    return w.config, w.provenance, w.latency_us, w.stale
