"""Evaluates step trials: configurations that were exchanged in whole steps of a model.

Each row of stage `step` is one configuration in one step: the step's time with it over the time without, all else being
what `base_id` is the digest of. Rows of one base compare; of each step only those of the newest base count. What a
configuration is worth is the geometric mean of its ratios over the steps, by the steps' weights. A base was itself
found by looking twice at what gains; so it stands unless another is faster by more than STEP_NOISE.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

from kerngen.tuning_db.read.values import Observation

# Of a step's time: what differs by less is equal there. On an H200 pairs of one run agree to 0.05 %, and one and the
# same exchange was -0.3 % in one process and +0.4 % in another.
STEP_NOISE = 0.005


@dataclass(frozen=True, slots=True)
class Verdict:
    """ratios: of machine codes that were judged in all of the steps that any was judged in. Empty: no step was run.
    chosen: that of them which the others were exchanged for.
    """

    ratios: Mapping[Hashable, float] = field(default_factory=dict)
    chosen: Hashable | None = None

    def has_lost(self, code: Hashable) -> bool:
        """Whether the step keeps a code from winning: it was slower there, or was not among what was judged. What was
        chosen stands unless one was faster by more than noise: others were judged by one look each, with it around.
        """
        if not self.ratios:
            return False
        least = min(self.ratios.values())
        if self.chosen is not None and self.ratios[self.chosen] <= least * (1 + STEP_NOISE):
            return code != self.chosen
        ratio = self.ratios.get(code)
        return ratio is None or ratio > least * (1 + STEP_NOISE)


def judged(observations: Sequence[Observation], weights: Mapping[str, float], codes: Mapping[str, Hashable]) -> Verdict:
    """Of rows of one tuned point that may win. weights: of steps by id; those that are not there do not count. codes:
    of builds by id, whose machine code it is that is judged.
    """
    rows = [o.measurement for o in observations if o.measurement.stage == "step" and o.measurement.step_id in weights]
    newest: dict[str | None, tuple[str, str | None]] = {}  # step -> when, base
    for m in rows:
        newest[m.step_id] = max(newest.get(m.step_id, ("", "")), (m.at, m.base_id))
    seen: dict[Hashable, dict[str, list[float]]] = {}  # code -> step -> ratios
    for m in rows:
        if m.base_id == newest[m.step_id][1] and m.step_us and m.base_step_us and m.build_id and m.step_id:
            seen.setdefault(codes[m.build_id], {}).setdefault(m.step_id, []).append(m.step_us / m.base_step_us)
    most = max((len(steps) for steps in seen.values()), default=0)
    whole = {code: steps for code, steps in seen.items() if len(steps) == most}
    ratios = {code: _mean(steps, weights) for code, steps in whole.items()}
    return Verdict(ratios, next((c for c, steps in whole.items() if _is_base(steps)), None))


def _is_base(steps: Mapping[str, Sequence[float]]) -> bool:
    """Whether the rows say of it that its step's time is that without: it was exchanged for itself."""
    return all(r == 1.0 for ratios in steps.values() for r in ratios)


def _mean(steps: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> float:
    total = sum(weights[id] for id in steps)
    return exp(sum(weights[id] * log(median(ratios)) for id, ratios in steps.items()) / total)
