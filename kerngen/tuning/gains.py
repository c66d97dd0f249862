"""What a tune has gained so far, for whoever waits: a line after each minute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kerngen.workload.steps import STEPS

if TYPE_CHECKING:
    from kerngen.tuning.budget import Weights
    from kerngen.tuning.task import Task

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Gain:
    """After `minutes`. what: a step, or all problems. faster: by how much less time its kernels alone take by the best
    configurations so far than by the defaults, as a part of that time; what was not tried yet counts as it is. None
    where nothing of it was tried. how: "measured" or "predicted".
    """

    minutes: int
    what: str
    faster: float | None
    how: str
    num_tried: int
    num_problems: int

    def __str__(self) -> str:
        tried = f"{self.num_tried} of {self.num_problems} problems tried"
        if self.faster is None:
            return f"after {self.minutes} min: nothing of {self.what} is known yet ({tried})"
        gained = f"{self.faster:.1%} faster than with the defaults" if self.faster >= 5e-4 else "as with the defaults"
        return f"after {self.minutes} min: {self.what} {gained} (kernels alone, {self.how}; {tried})"


class Gains:
    """Of one run. tell: is given each as it is known. began: by `clock`, in seconds."""

    def __init__(self, tell: Callable[[Gain], None], how: str, clock: Callable[[], float], began: float) -> None:
        self._tell, self._how, self._clock, self._began = tell, how, clock, began
        self._told = 0
        self._tasks: Sequence[Task] = ()
        self._what, self._launches = "", dict[int, int]()

    def begin(self, tasks: Sequence[Task], weights: Weights) -> None:
        """The step that is told of is the first of those by which a model is judged that the run has anything of."""
        self._tasks = tasks
        found = ((step.name, weights.launches(step)) for step, _ in STEPS)
        first = next(((name, launches) for name, launches in found if launches), None)
        self._what, launches = first or ("each problem once", dict.fromkeys(range(len(tasks)), 1))
        self._launches = dict(launches)

    def look(self) -> None:
        """Tell, if a minute is over since the last time."""
        minutes = int((self._clock() - self._began) / MINUTE_S)
        if self._tasks and minutes > self._told:
            self._told = minutes
            tried = sum(bool(t.search.outcomes) for t in self._tasks)
            faster = _faster(self._launches, self._tasks)
            self._tell(Gain(minutes, self._what, faster, self._how, tried, len(self._tasks)))


def _faster(launches: Mapping[int, int], tasks: Sequence[Task]) -> float | None:
    """What was not tried takes as much more than the model guesses as what was tried does."""
    default_us = best_us = guessed_us = untried_us = 0.0
    for place, count in launches.items():
        t = tasks[place]
        default = t.search.outcomes.get(t.search.candidates.default)
        if default is None or default.latency_us is None:
            untried_us += count * t.guessed_us
            continue
        default_us += count * default.latency_us
        best_us += count * t.search.best_us
        guessed_us += count * t.guessed_us
    if not default_us:
        return None
    return (default_us - best_us) / (default_us + untried_us * (default_us / guessed_us if guessed_us else 1.0))
