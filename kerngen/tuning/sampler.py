"""An Optuna sampler that knows the cost model and learns what it gets wrong.

What a configuration is expected to take is the cost model's time, times what residual.py has learned from those that
were measured so far. Proposed is the one, of all that are valid and not asked yet, with the least lower confidence
bound; where none of those is below the best so far, the one with the greatest expected improvement, so that a search
which has exhausted what it knows looks elsewhere. Of a batch each proposal is taken for measured as expected before the
next is made (Ginsbourger et al., 2010), so that a batch spreads.
"""

from __future__ import annotations

from math import erfc, log, pi, sqrt
from typing import TYPE_CHECKING, Any

import optuna

from kerngen.tuning.features import described
from kerngen.tuning.plan import GUESSED_REGISTERS
from kerngen.tuning.residual import Apart, Residual, apart, fit
from kerngen.tuning.space import on_grid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy import ndarray
    from optuna.distributions import BaseDistribution

    from kerngen.tuning.study import Search

CONFIDENCE = 1.0  # standard deviations below what is expected


class ResidualSampler(optuna.samplers.BaseSampler):
    """Of one `search`, whose outcomes it learns from. Deterministic, but for where everything is asked: there, as
    Optuna's random sampler of `seed`.
    """

    def __init__(self, search: Search, seed: int, confidence: float = CONFIDENCE) -> None:
        self._search, self._confidence = search, confidence
        self._random = optuna.samplers.RandomSampler(seed=seed)
        self._configs = list(dict.fromkeys([*search.candidates.valid, search.candidates.default]))
        self._place = {c: i for i, c in enumerate(self._configs)}
        registers = max((o.registers for o in search.outcomes.values()), default=0) or GUESSED_REGISTERS
        self._features, self._model = described(search.kernel, search.problem, search.target, self._configs, registers)
        self._on_grid = [i for i, c in enumerate(self._configs) if on_grid(search.candidates.space, c) is not None]
        self._columns: dict[int, Apart] = {}  # place -> all configurations' distance from it
        self._fitted: tuple[list[int], Residual] | None = None
        self._proposed: dict[int, dict[str, Any]] = {}  # trial number -> values

    def propose(self) -> Any | None:
        """The next configuration; None if all that are valid were asked for."""
        import numpy as np

        search = self._search
        under_way = [self._place[c] for c in search.pending if c in self._place]
        asked = {*under_way, *(self._place[c] for c in search.outcomes if c in self._place)}
        left = [i for i in self._on_grid if i not in asked]
        if not left:
            return None
        expected = self._model[left].copy()
        if (learned := self._learned(under_way)) is None:
            return self._configs[left[int(np.argmin(expected))]]
        residual, places = learned
        mean, deviation = residual.at(self._apart(places).rows(left))
        expected += mean
        best = log(min(o.latency_us for o in search.outcomes.values() if o.latency_us is not None))
        hoped = expected - self._confidence * deviation
        if hoped.min() < best:
            return self._configs[left[int(np.argmin(hoped))]]
        gain = log_expected_improvement(best - expected, deviation)
        return self._configs[left[int(np.argmax(gain))]]

    def _learned(self, under_way: list[int]) -> tuple[Residual, list[int]] | None:
        """What the outcomes say, and the places of which: those that were measured, and, taken for measured as
        expected, those that are under way. None if nothing was measured.
        """
        import numpy as np

        known = {self._place[c]: o.latency_us for c, o in self._search.outcomes.items() if c in self._place}
        measured = {i: log(us) - float(self._model[i]) for i, us in known.items() if us is not None}
        if not measured:
            return None
        # What failed counts as slow as the model was ever too fast: what is like it waits.
        worst = max(measured.values())
        places, wrong = list(known), np.array([measured.get(i, worst) for i in known])
        if self._fitted is None or self._fitted[0] != places:
            self._fitted = places, fit(self._apart(places).rows(places), wrong)
        residual = self._fitted[1]
        if not under_way:
            return residual, places
        believed, _ = residual.at(self._apart(places).rows(under_way))
        both = [*places, *under_way]
        return residual.given(self._apart(both).rows(both), np.concatenate([wrong, believed])), both

    def _apart(self, places: list[int]) -> Apart:
        """How far all configurations are from those at `places`; a column is worked out once."""
        import numpy as np

        for i in places:
            if i not in self._columns:
                self._columns[i] = apart(self._features, self._features[i : i + 1])
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
