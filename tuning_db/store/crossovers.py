"""Crossovers: sizes between two tuned points where another winner than the upper point's is best.

A point's winner serves the sizes down to the next lower point. Nearer to that one its winner may be better, or the
default, which looks at the real size. Nobody measured there; a judge (a cost model) says what each configuration takes,
and what was seen at the two points says by how much that is wrong for each of them at each end. A configuration that
was not tried at a point is taken to be no better there than its winner, and a default that was tried at neither is not
considered. What is better by MARGIN is written down as a `switch` of the upper winner: (up to this size, the tuned
point whose winner serves, None for the default). A winner that steps of a model chose has none: it was measured there,
at the sizes that those steps have. Nor has a carried one, which has no time to judge by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, log
from typing import Any

from kerngen.arch import Target
from kerngen.compiler.compile import Resources
from kerngen.errors import KerngenError
from kerngen.templates.kernel import Kernel, fields_of
from kerngen.tuning_db.read.ids import canonical
from kerngen.tuning_db.read.winner_table import why_unfit

# (problem, configuration, resources of its build) -> microseconds; only the ratios of its answers count.
Judge = Callable[[Any, Any, Mapping[str, Resources]], float]
Switch = tuple[int, int | None]

MARGIN = 0.03  # a prediction's ranking is no better than that
SIZES = 12  # judged between two points


@dataclass(frozen=True, slots=True)
class TunedPoint:
    """A winner that is current. problem: the tuned one. seen: what each configuration took there, by canonical JSON."""

    problem: Any
    config: Any
    us: float
    seen: Mapping[str, float]

    @property
    def at(self) -> int:
        return int(getattr(self.problem, self.problem.DYNAMIC))


def switches(
    kernel: Kernel,
    target: Target,
    below: TunedPoint,
    above: TunedPoint,
    entries: Callable[[Any], Mapping[str, Resources] | None],
    judge: Judge,
) -> list[Switch]:
    """The switch of `above`, whose last stretch it serves itself. entries: of a configuration's build, None if none.

    A size that was judged stands for those between it and the judged one before it.
    """
    weigh = _Weigher(kernel, target, below, above, entries, judge)
    found: list[Switch] = []
    for size in _sizes(below.at, above.at):
        best = weigh.best(size)
        if found and found[-1][1] == best:
            found[-1] = size, best
        else:
            found.append((size, best))
    while found and found[-1][1] == above.at:
        found.pop()
    return found


def _sizes(below: int, above: int) -> Iterator[int]:
    """At most SIZES of those between."""
    between = above - below - 1
    count = min(between, SIZES)
    yield from (below + round(between * (i + 1) / count) for i in range(count))


@dataclass(slots=True)
class _Weigher:
    kernel: Kernel
    target: Target
    below: TunedPoint
    above: TunedPoint
    entries: Callable[[Any], Mapping[str, Resources] | None]
    judge: Judge

    def best(self, size: int) -> int | None:
        """The tuned point whose winner serves `size`, None where the default does."""
        try:
            problem = replace(self.above.problem, **{self.above.problem.DYNAMIC: size})
            default = self.kernel.default_config(problem, self.target)
        except KerngenError:  # a size that the kernel does not take
            return self.above.at
        rivals: list[tuple[float, int | None]] = []
        if self.below.config != self.above.config:
            rivals.append((self._us(problem, self.below.config), self.below.at))
        if default not in (self.above.config, self.below.config):
            rivals.append((self._us(problem, default), None))
        us, who = min(rivals, key=lambda r: r[0], default=(inf, None))
        if us == inf:
            return self.above.at
        own = self._us(problem, self.above.config)
        return who if us < own * (1 - MARGIN) and own < inf else self.above.at

    def _us(self, problem: Any, config: Any) -> float:
        """What `config` takes, as far as anybody knows; inf where it cannot run, or nothing is known of it."""
        said = self._said(problem, config)
        wrong = self._wrong(problem, config) if said < inf else None
        return inf if wrong is None else said * wrong

    def _wrong(self, problem: Any, config: Any) -> float | None:
        """By how much the judge is wrong of `config` at that size; None where it was tried at neither point."""
        key = canonical(fields_of(config))
        ends = [(p, self._said(p.problem, config), p.seen.get(key)) for p in (self.below, self.above)]
        known = [us / said for _, said, us in ends if us is not None and said < inf]
        if not known:
            return None
        lower, upper = (
            known[0] if said == inf else us / said if us is not None else max(known[0], p.us / said)
            for p, said, us in ends
        )
        size = getattr(problem, problem.DYNAMIC)
        share = (log(size) - log(self.below.at)) / (log(self.above.at) - log(self.below.at))
        return lower + (upper - lower) * share

    def _said(self, problem: Any, config: Any) -> float:
        """What the judge says; inf where `config` cannot run, or was not built."""
        entries = self.entries(config)
        if entries is None or why_unfit(self.kernel, problem, config, self.target) is not None:
            return inf
        said = self.judge(problem, config, entries)
        return said if said > 0 else inf
