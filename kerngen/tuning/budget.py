"""Where a run's time goes: how much each problem weighs, when searching has to stop, which searches go on.

Portions of a few trials go to the searches where weight x expected gain is largest, until nothing is hoped for: what
carries the model's steps comes first. Of a problem the first trials are what runs today and the default configuration,
then what is best for its neighbours (neighbours.py), then what the sampler proposes. Parts of the time are kept for the
finals, and for writing down what won: nothing begins that would end after the budget's end, as far as is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from kerngen.workload.steps import STEPS, Kind, Step
from kerngen.workload.workload import Item

T = TypeVar("T")
_At = tuple[Kind, int]  # a step: what it is, and its context

PORTIONS = 32  # a round: enough that compilers are ahead of the GPU, few enough that the next round knows more
# A search is over where less is hoped for. On the recordings of an H200 that is after 21 trials in the mean, and what
# was found by then is within 5 % of the best of all but two (`tools.replay --least-gain 0.002`).
LEAST_GAIN = 0.002
JUDGED = 0.5  # of all weight, what the steps have by which a tuned model is judged; all others share the rest
MOST_FOR_FINALS, MOST_WHERE_SHORT = 0.25, 0.5  # of the whole time; where a quarter is less than finals take
# To derive a problem's winner and check it, in seconds: 600 problems took 9 s of a core of a slow host.
CONCLUDED_S = 0.015
MOST_FOR_CONCLUSION = 0.25  # of the whole time


class OutOfTime(Exception):
    """What was waited for is not there at the end of the run's time."""


@dataclass(slots=True)
class Budget:
    """The time of one run. seconds: None for no limit. clock: in seconds. began: when the run did, by it. final_s: to
    decide between a problem's finalists, as far as is known; finals_s: between all, at least. num_problems: whose
    winners are derived at the end.
    """

    seconds: float | None
    clock: Callable[[], float]
    began: float
    final_s: float
    finals_s: float = 0.0
    num_problems: int = 0

    def left(self, waited_s: float = 0.0) -> float:
        """Seconds until the conclusion has to begin, of which those spent waiting for others are no part."""
        if self.seconds is None:
            return inf
        return self.whole_left(waited_s) - self.conclusion_s

    @property
    def conclusion_s(self) -> float:
        """Seconds that deriving and checking the winners takes, as far as is known; kept free at the end."""
        return min(self.num_problems * CONCLUDED_S, MOST_FOR_CONCLUSION * (self.seconds or inf))

    def whole_left(self, waited_s: float = 0.0) -> float:
        """Seconds until the end, the conclusion's among them."""
        return inf if self.seconds is None else self.began + self.seconds + waited_s - self.clock()

    def reserve(self, num_finals: int) -> float:
        """Seconds that searching has to leave to so many finals."""
        whole = self.seconds or 0.0
        most = max(MOST_FOR_FINALS * whole, min(self.finals_s, MOST_WHERE_SHORT * whole))
        return min(num_finals * self.final_s, most)


class Weights:
    """How much each of `items` counts: its part of the time that a model's steps take.

    A step counts by its part of the mean by which a tuned model is judged (steps.STEPS); JUDGED of all weight is
    theirs, and every other step that was recorded has an even share of the rest. A problem that no step launches
    counts as a step of its own.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        contexts: dict[Kind, set[int]] = {}
        for item in items:
            for use in item.uses:
                contexts.setdefault(use.kind, set()).add(use.context)
        steps = {kind: sorted(cs - {0}) or [0] for kind, cs in contexts.items()}
        self._launches: dict[_At, dict[int, int]] = {(kind, c): {} for kind, cs in steps.items() for c in cs}
        for place, item in enumerate(items):
            for use in item.uses:
                kind = use.kind
                for c in [use.context] if use.context else steps[kind]:
                    there = self._launches[kind, c]
                    there[place] = there.get(place, 0) + use.count
        self._lone = [place for place, item in enumerate(items) if not any(use.count for use in item.uses)]
        self._counts = _importances(self._launches, len(self._lone))

    def launches(self, step: Step) -> Mapping[int, int]:
        """Of the items that `step` launches, by their place: how often. Empty where it was not recorded."""
        return self._launches.get((step.kind, step.context), {})

    def of(self, us: Sequence[float]) -> list[float]:
        """From microseconds a launch of each problem; they add up to 1."""
        found = [0.0] * len(us)
        for step, launches in self._launches.items():
            times = {place: count * us[place] for place, count in launches.items()}
            whole = sum(times.values())
            for place, time in times.items():
                found[place] += self._counts[step] * time / whole if whole else 0.0
        for place in self._lone:
            found[place] = self._counts[None]
        total = sum(found) or 1.0
        return [weight / total for weight in found]


def _importances(steps: Iterable[_At], num_lone: int) -> dict[_At | None, float]:
    """Of each step; of what belongs to none under None."""
    judged = {(s.kind, s.context): weight for s, weight in STEPS}
    here = {step: judged[step] for step in steps if step in judged}
    others = [step for step in steps if step not in judged]
    even = 1.0 / ((len(others) + num_lone) or 1)
    scale = JUDGED / (1 - JUDGED) / (sum(here.values()) or 1.0)
    return {step: weight * scale for step, weight in here.items()} | dict.fromkeys(others, even) | {None: even}


def portions(values: Mapping[T, float], most: int) -> list[T]:
    """Those that get the next portion, the most valuable first; of equals those that stand first."""
    return sorted(values, key=lambda t: -values[t])[:most]
