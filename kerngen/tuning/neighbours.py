"""Neighbouring problems: the best configuration of one is worth a trial for the other.

Neighbours share a kernel and all that is compiled in, so that they share builds too; they lie the nearer, the less
tokens, batch and context differ, as ratios.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log2
from typing import Any

from kerngen.tuning_db.read.ids import ProblemKey

NEAREST = 3
OTHERWISE = 4.0  # how far two values are that cannot be divided: as a ratio of sixteen


def distance(a: ProblemKey, b: ProblemKey) -> float:
    """Between two problems of one static key: the sum over runtime fields of the logarithm (base 2) of their ratio."""
    fields = {**a.runtime, "": a.dynamic}
    return sum(_apart(value, ({**b.runtime, "": b.dynamic}).get(name)) for name, value in fields.items())


def _apart(a: Any, b: Any) -> float:
    if a == b:
        return 0.0
    if isinstance(a, bool) or isinstance(b, bool) or not (isinstance(a, int) and isinstance(b, int)):
        return OTHERWISE
    return abs(log2(1 + max(a, 0)) - log2(1 + max(b, 0)))


def nearest(key: ProblemKey, others: Iterable[ProblemKey], count: int = NEAREST) -> list[int]:
    """Places in `others`, which share the static key, of those nearest to `key`; itself is none. Ties by place."""
    apart = [(distance(key, other), i) for i, other in enumerate(others) if other != key]
    return [i for _, i in sorted(apart)[:count]]


class Neighbours:
    """Of all problems of a run, by their place in `keys`."""

    def __init__(self, keys: Sequence[ProblemKey]) -> None:
        self._keys = keys
        self._groups: dict[str, list[int]] = {}
        for i, key in enumerate(keys):
            self._groups.setdefault(key.static_key, []).append(i)
        self._found: dict[int, list[int]] = {}

    def of(self, place: int) -> list[int]:
        """The places of its nearest, the nearest first."""
        if place not in self._found:
            group = self._groups[self._keys[place].static_key]
            near = nearest(self._keys[place], [self._keys[i] for i in group])
            self._found[place] = [group[i] for i in near]
        return self._found[place]
