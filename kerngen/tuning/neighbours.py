"""Neighbouring problems: the best configuration of one is worth a trial for the other.

Neighbours are of one kernel and one kind, and lie the nearer, the less their sizes differ, as ratios: tokens, batch and
context, and the sizes that are compiled in (kerngen/runtime/neighbours.py). Those that share all of these share builds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest
from typing import Any

from kerngen.runtime.neighbours import Shape
from kerngen.tuning_db.read.ids import ProblemKey

NEAREST = 3


def nearest(shape: Shape, others: Iterable[Shape], count: int = NEAREST) -> list[int]:
    """Places in `others`, which are of its kind, of those nearest to `shape`; itself is none. Ties by place."""
    apart = ((sum(shape.octaves(other)), i) for i, other in enumerate(others) if other is not shape)
    return [i for _, i in nsmallest(count, apart)]


class Neighbours:
    """Of all problems of a run, by their place in `keys`."""

    def __init__(self, keys: Sequence[ProblemKey]) -> None:
        self._shapes = [Shape.of(key.flat) for key in keys]
        self._group_of = [(key.kernel, shape.kind) for key, shape in zip(keys, self._shapes, strict=True)]
        self._groups: dict[Any, list[int]] = {}
        for place, group in enumerate(self._group_of):
            self._groups.setdefault(group, []).append(place)
        self._found: dict[int, list[int]] = {}

    def of(self, place: int) -> list[int]:
        """The places of its nearest, the nearest first."""
        if place not in self._found:
            group = self._groups[self._group_of[place]]
            near = nearest(self._shapes[place], [self._shapes[i] for i in group])
            self._found[place] = [group[i] for i in near]
        return self._found[place]
