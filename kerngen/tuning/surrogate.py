"""A surrogate of the cost model's error: a Gaussian process on log(measured / model), fitted to a few measurements.

Its covariance is a constant (the model may be off by a factor everywhere), a sum over features of a Matern 5/2 in each
(a tunable's value may cost more than the model thinks, whatever the others are) and a Matern 5/2 in all of them at once
(so may a combination), and noise. How much of each, and how far they reach, is taken from a short list by the marginal
likelihood; the scale of all of it follows in closed form under an inverse-gamma prior. After Rasmussen and Williams,
Gaussian Processes for Machine Learning, 2.2 and 5.4; the additive part as in Duvenaud et al., 2011.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import log, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import ndarray

CONSTANT = 25.0  # variance of the common factor, in units of the rest's: as good as unknown
SINGLE_REACH = 0.5  # of the Matern in one feature, which is 0..1
SHARES = (0.2, 0.5, 0.8)  # of the variance that the single features have
REACHES = (0.25, 0.5, 1.0)  # of the Matern in all features, times the root of their number
NOISES = (0.003, 0.03, 0.2)  # variance, to that of the rest
# The prior of the scale: a cost model is off by a factor of about e ** 0.3, as sure as four measurements would be.
PRIOR_COUNT, PRIOR_VARIANCE = 4.0, 0.09


@dataclass(frozen=True)
class Apart:
    """How far each of some points lies from each of some others [some, others].

    single: the mean over features of the Matern in each alone. square: the mean over features of the squared distance.
    """

    single: ndarray
    square: ndarray

    def rows(self, which: Sequence[int]) -> Apart:
        return Apart(self.single[which], self.square[which])


def apart(features: ndarray, others: ndarray) -> Apart:
    """Of `features` [some, columns] and `others` [others, columns], both 0..1."""
    import numpy as np

    if not features.shape[1]:
        shape = len(features), len(others)
        return Apart(np.ones(shape), np.zeros(shape))
    distance = np.abs(features[:, None, :] - others[None, :, :])  # [some, others, columns]
    return Apart(_matern(distance / SINGLE_REACH).mean(-1), (distance**2).mean(-1))


@dataclass(frozen=True)
class Residual:
    """Fitted: `at` gives the mean and standard deviation of the log-residual anywhere.

    variance: of everything, noise aside. share, reach, noise: what was chosen of SHARES, REACHES and NOISES.
    """

    factor: ndarray  # Cholesky, lower, [measured, measured]
    weights: ndarray  # [measured]
    variance: float
    share: float
    reach: float
    noise: float

    def at(self, where: Apart) -> tuple[ndarray, ndarray]:
        """(mean, standard deviation) at each point of `where` [many, measured], without a measurement's own noise."""
        found = self.over(where)
        return found.mean, found.deviation

    def over(self, where: Apart) -> Field:
        """The same, of points that are to be believed in, one after the other."""
        return Field(self, where)


class Field:
    """What a Residual says of many points at once, and how that narrows as some of them are asked for.

    mean: log-residual at each point [many].
    """

    def __init__(self, residual: Residual, where: Apart) -> None:
        import numpy as np

        across = _covariance(where, residual.share, residual.reach)
        self.mean = across @ residual.weights
        self._residual = residual
        self._half = np.linalg.solve(residual.factor, across.T)  # [measured, many]
        self._left = CONSTANT + 1.0 - (self._half**2).sum(0)

    @property
    def deviation(self) -> ndarray:
        """Standard deviation at each point [many], without a measurement's own noise."""
        import numpy as np

        found: ndarray = np.sqrt(self._residual.variance * np.maximum(self._left, 0.0))
        return found

    def believe(self, at: int, apart_from_it: Apart) -> None:
        """Take point `at` for measured, and as expected: no mean moves, what is near it gets surer.

        apart_from_it: how far all points lie from that one [many, 1].
        """
        import numpy as np

        r = self._residual
        row = _covariance(apart_from_it, r.share, r.reach)[:, 0] - self._half[:, at] @ self._half
        row = row / sqrt(max(float(row[at]), 0.0) + r.noise)
        self._half = np.vstack([self._half, row])
        self._left = self._left - row**2


def fit(between: Apart, residual: ndarray) -> Residual:
    """The process that makes `residual` [measured] likeliest, of points that lie `between` each other as said."""
    import numpy as np

    count = len(residual)
    best: tuple[float, Residual] | None = None
    for share, reach in product(SHARES, REACHES):
        covariance = _covariance(between, share, reach)
        for noise in NOISES:
            factor = np.linalg.cholesky(covariance + noise * np.eye(count))
            half = np.linalg.solve(factor, residual)
            spread = PRIOR_COUNT * PRIOR_VARIANCE + float(half @ half)
            # The scale integrated out leaves a Student's t.
            score = -float(np.log(np.diag(factor)).sum()) - 0.5 * (PRIOR_COUNT + count) * log(spread)
            if best is None or score > best[0]:
                weights = np.linalg.solve(factor.T, half)
                best = score, Residual(factor, weights, spread / (PRIOR_COUNT + count), share, reach, noise)
    if best is None:
        raise ValueError("no candidates for the covariance")
    return best[1]


def _covariance(where: Apart, share: float, reach: float) -> ndarray:
    """CONSTANT + 1 where a point meets itself."""
    import numpy as np

    covariance: ndarray = CONSTANT + share * where.single + (1 - share) * _matern(np.sqrt(where.square) / reach)
    return covariance


def _matern(distance: ndarray) -> ndarray:
    import numpy as np

    r = sqrt(5.0) * distance
    smooth: ndarray = (1 + r + r**2 / 3) * np.exp(-r)
    return smooth
