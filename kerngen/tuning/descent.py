"""Which configurations make a whole step fastest: coordinate descent with joint moves of neighbours.

Kernels alone are the filter, the step is the judge: of each place in a step a few configurations that are fast alone
are given, and a judge that says how long the step takes with some of them exchanged. What a kernel leaves to its
successor shows in that, and where two must change together because each alone loses, the pairs that follow each other
are tried jointly. Knows neither kernels nor a GPU: places and configurations are whatever the caller hands over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)
C = TypeVar("C", bound=Hashable)

LEAST_SHARE = 0.02  # of the step's time, that each of two places has that are worth joint moves
TOGETHER = 3  # configurations of each of the two that are tried together, the best by themselves
LOOKS = 2  # of the best of a place's, how many get a second look if the one before did not stand it


@dataclass(frozen=True, slots=True)
class Place(Generic[P, C]):
    """A problem of the step. configs: to choose from, the best alone first. share: of the step's time."""

    name: P
    configs: tuple[C, ...]
    share: float


@dataclass(frozen=True, slots=True)
class Move(Generic[P, C]):
    """What was adopted, and the time of the step with it over the time without, by the look that decided."""

    to: tuple[tuple[P, C], ...]
    ratio: float


@dataclass(frozen=True, slots=True)
class Interaction(Generic[P, C]):
    """Two configurations together: excess is the step's ratio with both over the product of each one's, less 1, all
    against what was chosen at that time. Below 0 they gain together what neither gains alone, as far as noise lets that
    be seen.
    """

    pair: tuple[tuple[P, C], tuple[P, C]]
    excess: float


@dataclass(frozen=True, slots=True)
class Descent(Generic[P, C]):
    """What came of it. ratio: of the step with `chosen` to the step with the first start, judged anew at the end; 1.0
    and that start itself where nothing was found that is faster. complete: False where max_evaluations ended it.
    """

    chosen: Mapping[P, C]
    ratio: float
    moves: tuple[Move[P, C], ...]
    interactions: tuple[Interaction[P, C], ...]
    num_evaluations: int
    complete: bool


# (base, other) -> the step's time with `other` over its time with `base`, of runs side by side; both have every place's
# configuration. Infinite where `other` cannot run. May raise Spent.
Judge = Callable[[Mapping[P, C], Mapping[P, C]], float]


class Spent(Exception):
    """No further evaluation: all are used up, or whoever judges has no time for one."""


def descend(
    places: Sequence[Place[P, C]],
    neighbours: Iterable[tuple[P, P]],
    judge: Judge[P, C],
    starts: Sequence[Mapping[P, C]],
    *,
    noise: Callable[[Collection[P]], float],
    max_evaluations: int,
) -> Descent[P, C]:
    """Improve the best of `starts` (defaults, winners alone, what a database has) until no move makes the step faster.

    neighbours: places that follow each other. noise: of some places' names, what the judge's answer may be off by where
    those have changed; what gains no more is not adopted, and what does is judged a second time first: the best of many
    looks is partly the luckiest. A place is looked at again when it or a neighbour has changed. Deterministic as far as
    the judge is.
    """
    run = _Run(judge, noise, max_evaluations, dict(starts[0]))
    pairs = _pairs(places, neighbours)
    complete = True
    try:
        for start in starts[1:]:
            run.consider(dict(start))
        _settle(run, sorted(places, key=lambda p: -p.share), pairs)
    except Spent:
        complete = False
    ratio = 1.0
    if run.chosen != starts[0]:
        try:
            ratio = judge(starts[0], run.chosen)
            run.num_evaluations += 1
        except Spent:  # then nobody knows that it is faster
            complete = False
    if ratio >= 1.0:
        return Descent(dict(starts[0]), 1.0, (), tuple(run.interactions), run.num_evaluations, complete)
    return Descent(run.chosen, ratio, tuple(run.moves), tuple(run.interactions), run.num_evaluations, complete)


@dataclass(slots=True)
class _Run(Generic[P, C]):
    """The assignment so far, and what was seen on the way. The last evaluation is left for the answer."""

    judge: Judge[P, C]
    noise: Callable[[Collection[P]], float]
    max_evaluations: int
    chosen: dict[P, C]
    num_evaluations: int = 0
    moves: list[Move[P, C]] = field(default_factory=list)
    interactions: list[Interaction[P, C]] = field(default_factory=list)

    def ratio(self, to: Mapping[P, C]) -> float:
        """Of the step with `to` exchanged."""
        if self.num_evaluations + 1 >= self.max_evaluations:
            raise Spent
        self.num_evaluations += 1
        return self.judge(self.chosen, self.chosen | dict(to))

    def adopt(self, seen: Mapping[tuple[tuple[P, C], ...], float]) -> bool:
        """Take the best of these moves that a second look confirms, if one does."""
        promising = sorted((r, i, to) for i, (to, r) in enumerate(seen.items()) if r < 1 - self._noise(to))
        for _, _, to in promising[:LOOKS]:
            again = self.ratio(dict(to))
            if again < 1 - self._noise(to):
                self.chosen |= dict(to)
                self.moves.append(Move(to, again))
                return True
        return False

    def _noise(self, to: Iterable[tuple[P, C]]) -> float:
        return self.noise([name for name, _ in to])

    def consider(self, start: dict[P, C]) -> None:
        to = tuple((p, c) for p, c in start.items() if self.chosen[p] != c)
        if to:
            self.adopt({to: self.ratio(dict(to))})


def _pairs(places: Sequence[Place[P, C]], neighbours: Iterable[tuple[P, P]]) -> list[tuple[Place[P, C], Place[P, C]]]:
    """Each pair once, in whichever order it was met first, those of most time first."""
    known = {p.name: p for p in places if len(p.configs) > 1 and p.share >= LEAST_SHARE}
    met = dict.fromkeys(frozenset(pair) for pair in neighbours if pair[0] != pair[1])
    found = [tuple(known[name] for name in known if name in pair) for pair in met]
    return sorted(((p[0], p[1]) for p in found if len(p) == 2), key=lambda p: -(p[0].share + p[1].share))


def _settle(run: _Run[P, C], places: Sequence[Place[P, C]], pairs: Sequence[tuple[Place[P, C], Place[P, C]]]) -> None:
    """Rounds of single moves, then joint ones, until every place and pair was looked at in what is around it now."""
    beside: dict[P, set[P]] = {p.name: set() for p in places}
    for a, b in pairs:
        beside[a.name].add(b.name)
        beside[b.name].add(a.name)
    alone: dict[P, dict[C, float]] = {}  # ratios of single moves, in what is around them now
    settled = set[tuple[P, P]]()

    def changed(*names: P) -> None:
        """What stands beside these, and pairs with any of them, are not known any more."""
        for name in names:
            for other in beside[name].difference(names):
                alone.pop(other, None)
            settled.difference_update({pair for pair in settled if name in pair})

    while True:
        moved = False
        for place in places:
            if place.name in alone:
                continue
            now = run.chosen[place.name]
            seen = {c: run.ratio({place.name: c}) for c in place.configs if c != now}
            alone[place.name] = {now: 1.0} | seen
            if run.adopt({((place.name, c),): r for c, r in seen.items()}):
                adopted = seen[run.chosen[place.name]]
                alone[place.name] = {c: r / adopted for c, r in alone[place.name].items()}
                changed(place.name)
                moved = True
        for a, b in pairs:
            if (a.name, b.name) in settled or a.name not in alone or b.name not in alone:
                continue
            if run.adopt(_together(run, a.name, b.name, alone)):
                for name in (a.name, b.name):
                    alone.pop(name)
                changed(a.name, b.name)
                moved = True
            else:
                settled.add((a.name, b.name))
        if not moved:
            return


def _together(
    run: _Run[P, C], a: P, b: P, alone: Mapping[P, Mapping[C, float]]
) -> dict[tuple[tuple[P, C], ...], float]:
    """Ratios of exchanging both, of the best of each that are not chosen now; their interactions are noted."""
    best = [
        sorted((c for c, r in alone[name].items() if c != run.chosen[name] and r < inf), key=alone[name].__getitem__)
        for name in (a, b)
    ]
    seen: dict[tuple[tuple[P, C], ...], float] = {}
    for x, y in product(best[0][:TOGETHER], best[1][:TOGETHER]):
        pair = (a, x), (b, y)
        seen[pair] = run.ratio(dict(pair))
        run.interactions.append(Interaction(pair, seen[pair] / (alone[a][x] * alone[b][y]) - 1))
    return seen
