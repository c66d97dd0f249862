"""The end of a tune that steps judge: each step by what a run chooses now, over what it chose before.

As `kerngen bench step` compares two databases: of each call of a step what a run of the model would choose, in pairs.
Where a step is slower by more than noise, what was exchanged in it is taken back. Rows of stage "step" then say that
what ran before is what was chosen, in all steps that have it, and the winners that follow are those from before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import exp, inf, log
from typing import TYPE_CHECKING, Any

from kerngen.errors import KerngenError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import describe, fields_of
from kerngen.tuning.budget import OutOfTime
from kerngen.tuning_db.read.ids import digest
from kerngen.workload.steps import Ratio

if TYPE_CHECKING:
    from kerngen.runtime.selection import Selector
    from kerngen.tuning.objective import Outcome, Selections
    from kerngen.tuning.step_objective import Choice, JudgedStep, Looks, Name
    from kerngen.tuning.task import Trial
    from kerngen.tuning_db.read.values import StepKey

END_PAIRS = 15  # of runs, before and now in turn
LEAST_CULPRIT = 0.001  # of a step's time: what is lost by less by itself is no culprit


class End:
    """ratios: of each step, in the order of `looks`; infinite where it could not be judged."""

    def __init__(
        self,
        looks: Looks,
        trials: Mapping[Name, Mapping[Any, Trial]],
        selections: Selections,
        left: Callable[[], float],
    ) -> None:
        self._looks, self._trials, self._selections, self._left = looks, trials, selections, left
        self.ratios: list[Ratio] = []
        self._taken: dict[Name, None] = {}
        self._kept: dict[Name, None] = {}  # what cannot be taken back: what ran before does not run now

    def rows(self) -> Iterator[tuple[Trial, Outcome]]:
        """What takes back whatever makes a step slower, until none is, or nothing is left to take back."""
        while True:
            now = self._selections.now()
            afters = [self._running(step, now) for step in self._looks.steps]
            self.ratios = [self._judged(*pair) for pair in zip(self._looks.steps, afters, strict=True)]
            slow: dict[Name, None] = {}
            for step, after, ratio in zip(self._looks.steps, afters, self.ratios, strict=True):
                if ratio.median > 1 + step.noise:
                    slow |= dict.fromkeys(self._culprits(step, after, ratio))
            if not slow:
                return
            yield from self._taken_back(slow)

    def in_words(self) -> list[str]:
        """For the report; once `rows` are through."""
        steps, ratios = self._looks.steps, self.ratios
        weight = sum(s.key.weight for s, r in zip(steps, ratios, strict=True) if r.median < inf)
        mean = exp(sum(s.key.weight * log(r.median) for s, r in zip(steps, ratios, strict=True) if r.median < inf)
                   / (weight or 1.0))  # fmt: skip
        each = "; ".join(
            f"{s.key.name}: {r.median:.3f} +- {r.spread:.3f}" if r.median < inf else f"{s.key.name}: not judged"
            for s, r in zip(steps, ratios, strict=True)
        )
        found = [f"steps at the end: {mean:.3f} of before ({each})"]
        if self._taken:
            found.append(f"taken back, since a step was slower with it: {_named(self._taken)}")
        if self._kept:
            found.append(f"slower in a step, and what ran before does not run any more: {_named(self._kept)}")
        return found

    def _running(self, step: JudgedStep, now: Selector) -> Choice | None:
        """None where that is not to be had: its machine code was not made in time."""
        try:
            return self._looks.running(step, now)
        except (KerngenError, OutOfTime):
            return None

    def _judged(self, step: JudgedStep, after: Choice | None) -> Ratio:
        if after is None:
            return Ratio(inf, 0.0, step.base_us)
        if all(after[p][0] == config for p, (config, _) in step.before.items()):
            return Ratio(1.0, 0.0, step.base_us)
        try:
            return self._looks.compare(step, step.before, after, END_PAIRS, self._left())
        except (KerngenError, OutOfTime):
            return Ratio(inf, 0.0, step.base_us)

    def _culprits(self, step: JudgedStep, after: Choice | None, ratio: Ratio) -> list[Name]:
        """Of what was exchanged in the step and not yet taken back: what makes it faster by going back alone. All of
        it where nothing does, where some went back already, or where there is no time to look.
        """
        changed: dict[Name, Choice] = {}
        for point, (config, image) in step.before.items():
            name = step.names[point]
            is_same = after is not None and after[point][0] == config
            if name is not None and not is_same and name not in self._taken and name not in self._kept:
                changed[name] = {**changed.get(name, {}), point: (config, image)}
        if after is None or ratio.median == inf or self._taken or self._left() < (len(changed) + 2) * step.look_s:
            return list(changed)
        found = []
        for name, back in changed.items():
            try:
                alone = self._looks.compare(step, after, {**after, **back}, END_PAIRS, self._left())
            except (KerngenError, OutOfTime):
                return list(changed)
            if alone.median < 1 - max(LEAST_CULPRIT, 2 * alone.spread):
                found.append(name)
        return found or list(changed)

    def _taken_back(self, names: Mapping[Name, None]) -> Iterator[tuple[Trial, Outcome]]:
        before = self._selections.before
        calls = (
            (p.kernel, describe(p.problem), fields_of(c)) for s in self._looks.steps for p, (c, _) in s.before.items()
        )
        base = digest(["before", *calls])
        for name in names:
            config = before.choice(find_kernel(name[0]), name[1]).config
            if (trial := self._trials.get(name, {}).get(config)) is None:
                self._kept[name] = None
                continue
            self._taken[name] = None
            for step, ratio in zip(self._looks.steps, self.ratios, strict=True):
                if name in step.points:
                    tags = {"taken_back": ratio.median if ratio.median < inf else None}
                    yield trial, outcome_in(trial, step.key, Ratio(1.0, 0.0, ratio.base_us), base, tags)


def outcome_in(trial: Trial, key: StepKey, ratio: Ratio, base_id: str, tags: Mapping[str, Any]) -> Outcome:
    alone = trial.task.search.outcomes[trial.config]
    figures = {"step_us": ratio.median * ratio.base_us, "base_step_us": ratio.base_us, "base_id": base_id}
    return replace(alone, figures={**alone.figures, **figures}, tags=tags, stage="step", step=key)


def _named(names: Mapping[Name, None]) -> str:
    return ", ".join(f"{kernel}{describe(problem)}" for kernel, problem in names)
