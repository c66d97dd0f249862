"""An Optuna sampler that knows the cost model and learns what it gets wrong.

What a configuration is expected to take is the cost model's time, times what surrogate.py has learned from those that
were measured so far. Proposed is the one, of all that are valid and not asked yet, with the least lower confidence
bound; where none of those is below the best so far, the one with the greatest expected improvement, so that a search
which has exhausted what it knows looks elsewhere. Of a batch each proposal is taken for measured as expected before the
next is made (Ginsbourger et al., 2010), so that a batch spreads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import erfc, log, pi, sqrt
from typing import TYPE_CHECKING, Any

import optuna

from kerngen.tuning.surrogate import Apart, Field, apart, fit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy import ndarray
    from optuna.distributions import BaseDistribution

    from kerngen.tuning.features import Described
    from kerngen.tuning.study import Search

# Standard deviations below what is expected: of the grids that an H200 recorded, 2 to 2.5 find the best of each; with
# less, and with more, the best of one that stands alone is missed (docs/tuning.md).
CONFIDENCE = 2.25


@dataclass(slots=True)
class _Learned:
    """What outcomes say. places: of the configurations that were measured or failed. best: log of the least time.
    believed: places that are taken for measured beside.
    """

    places: list[int]
    everywhere: Field
    best: float
    believed: list[int] = field(default_factory=list)


class ResidualSampler(optuna.samplers.BaseSampler):
    """Of one `search`, whose outcomes it learns from. known: what the search may ask for. Deterministic, but for where
    everything is asked: there, as Optuna's random sampler of `seed`.
    """

    def __init__(self, search: Search, known: Described, seed: int) -> None:
        self._search, self._known = search, known
        self._random = optuna.samplers.RandomSampler(seed=seed)
        self._place = {c: i for i, c in enumerate(known.configs)}
        self._columns: dict[int, Apart] = {}  # place -> all configurations' distance from it
        self._learned: _Learned | None = None
        self._proposed: dict[int, dict[str, Any]] = {}  # trial number -> values

    @property
    def num_left(self) -> int:
        """Of what may be asked for, how much was not."""
        asked = (*self._search.outcomes, *self._search.pending)
        return len(self._place) - sum(c in self._place for c in asked)

    def propose(self) -> Any | None:
        """The next configuration; None if all that are valid were asked for."""
        import numpy as np

        left = np.flatnonzero(self._left())
        if not len(left):
            return None
        expected = self._known.model[left]
        if (learned := self._learn()) is None:
            return self._known.configs[left[int(np.argmin(expected))]]
        expected, deviation = expected + learned.everywhere.mean[left], learned.everywhere.deviation[left]
        hoped = expected - CONFIDENCE * deviation
        if hoped.min() < learned.best:
            return self._known.configs[left[int(np.argmin(hoped))]]
        gain = log_expected_improvement(learned.best - expected, deviation)
        return self._known.configs[left[int(np.argmax(gain))]]

    def expected_gain(self) -> float:
        """How much faster than the best so far the next proposal is hoped to be, as a part of it, 0 at least: the
        greatest expected improvement of what is left; 0 too where nothing was measured.
        """
        import numpy as np

        left = np.flatnonzero(self._left())
        if not len(left) or (learned := self._learn()) is None:
            return 0.0
        expected = self._known.model[left] + learned.everywhere.mean[left]
        gain = log_expected_improvement(learned.best - expected, learned.everywhere.deviation[left])
        return float(1 - np.exp(-np.exp(gain.max())))

    def _left(self) -> ndarray:
        """Of every place, whether it was not asked for yet."""
        import numpy as np

        left = np.ones(len(self._place), dtype=bool)
        left[[self._place[c] for c in (*self._search.outcomes, *self._search.pending) if c in self._place]] = False
        return left

    def _learn(self) -> _Learned | None:
        """What the outcomes say of all places, those that are under way taken for measured as expected. None if nothing
        was measured.
        """
        import numpy as np

        known = {self._place[c]: o.latency_us for c, o in self._search.outcomes.items() if c in self._place}
        under_way = [self._place[c] for c in self._search.pending if c in self._place]
        measured = {i: log(us) - float(self._known.model[i]) for i, us in known.items() if us is not None}
        if not measured:
            return None
        learned, places = self._learned, list(known)
        if learned is None or learned.places != places or learned.believed != under_way[: len(learned.believed)]:
            # What failed counts as slow as the model was ever too fast: what is like it waits.
            worst = max(measured.values())
            where = self._apart(places)
            residual = fit(where.rows(places), np.array([measured.get(i, worst) for i in known]))
            best = log(min(o.latency_us for o in self._search.outcomes.values() if o.latency_us is not None))
            learned = self._learned = _Learned(places, residual.over(where), best)
        for place in under_way[len(learned.believed) :]:
            learned.everywhere.believe(place, self._apart([place]))
            learned.believed.append(place)
        return learned

    def _apart(self, places: list[int]) -> Apart:
        """How far all configurations are from those at `places`; a column is worked out once."""
        import numpy as np

        features = self._known.features
        for i in places:
            if i not in self._columns:
                self._columns[i] = apart(features, features[i : i + 1])
        found = [self._columns[i] for i in places]
        return Apart(np.hstack([a.single for a in found]), np.hstack([a.square for a in found]))

    # -- as Optuna asks for it

    def infer_relative_search_space(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial
    ) -> dict[str, BaseDistribution]:
        if (config := self.propose()) is None or (found := self._search.parameters(config)) is None:
            return {}
        space = {name: where for name, (where, _) in found.items() if not where.single()}
        self._proposed[trial.number] = {name: found[name][1] for name in space}
        return space

    def sample_relative(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._proposed.pop(trial.number, {})

    def sample_independent(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, name: str, distribution: BaseDistribution
    ) -> Any:
        return self._random.sample_independent(study, trial, name, distribution)


def log_expected_improvement(margin: ndarray, deviation: ndarray) -> ndarray:
    """Logarithm of the mean of max(0, margin + deviation * N(0, 1)), elementwise; of use where that is 1e-300, too.

    margin: by how much what is expected is below the best so far. Far below zero the asymptotic series of the normal
    tail takes over from the difference of two numbers that are nearly one (Ament et al., 2023).
    """
    import numpy as np

    deviation = np.maximum(deviation, 1e-9)
    z = margin / deviation
    density = np.exp(-0.5 * z**2) / sqrt(2 * pi)
    below = np.array([0.5 * erfc(-x / sqrt(2)) for x in z])
    near = np.log(np.maximum(density + z * below, 1e-300))
    tail = np.maximum(-z, 4.0)
    far = -0.5 * z**2 - 0.5 * log(2 * pi) - 2 * np.log(tail) + np.log1p(-3 / tail**2 + 15 / tail**4)
    gain: ndarray = np.log(deviation) + np.where(z > -5, near, far)
    return gain
