"""What steps of a model say of configurations that were exchanged in them.

Each row of stage `step` is one configuration in one step: the step's time with it over the time without, all else being
what `base_id` is the digest of. Rows of one base compare; of each step only those of the newest base count. What a
configuration is worth is the geometric mean of its ratios over the steps, by the steps' weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

from kerngen.tuning_db.serve.values import Observation

STEP_NOISE = 0.002  # of a step's time: what differs by less is equal there, and the times alone decide


@dataclass(frozen=True, slots=True)
class Verdict:
    """ratios: of machine codes that were judged in all of the steps that any was judged in. Empty: no step was run."""

    ratios: Mapping[Hashable, float] = field(default_factory=dict)

    def has_lost(self, code: Hashable) -> bool:
        """Whether the step keeps a code from winning: it was slower there, or was not among what was judged."""
        if not self.ratios:
            return False
        ratio = self.ratios.get(code)
        return ratio is None or ratio > min(self.ratios.values()) * (1 + STEP_NOISE)


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
    return Verdict({code: _mean(steps, weights) for code, steps in whole.items()})


def _mean(steps: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> float:
    total = sum(weights[id] for id in steps)
    return exp(sum(weights[id] * log(median(ratios)) for id, ratios in steps.items()) / total)
