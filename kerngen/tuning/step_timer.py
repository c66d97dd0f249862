"""The steps of a model that judge a tune, timed by the GPU's process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any

from kerngen.arch import Target
from kerngen.errors import LaunchError
from kerngen.runtime.selection import default_selector
from kerngen.templates import find_kernel
from kerngen.templates.kernel import describe
from kerngen.tuning.plan import lower_bound_us
from kerngen.tuning.step_objective import Choice, StepPoint, TimedStep
from kerngen.tuning_db.read.ids import digest
from kerngen.tuning_db.read.values import StepKey
from kerngen.workload.steps import Fuses, Ratio, Repeat, Step, launch_counts, shortened, steps_for

if TYPE_CHECKING:
    from kerngen.templates.kernel import Kernel
    from kerngen.tuning.step_worker import Exchanged
    from kerngen.tuning.worker import GpuWorker
    from kerngen.workload.workload import Model, Workload


@dataclass
class GpuTimer:
    """A StepTimer: `step` of `model`, which may be a shortened one that stands for a whole one as `repeat` says, on the
    worker's GPU. fuses: decides where the step asks one kernel in place of several.
    """

    worker: GpuWorker
    model: Model
    step: Step
    target: Target
    repeat: Repeat
    fuses: Fuses

    @cached_property
    def _calls(self) -> tuple[dict[tuple[str, Any], int], dict[tuple[str, Any], bool]]:
        """The step's (kernel, problem)s, how often each; and of those that replace several whether it asks them."""
        fused: dict[tuple[str, Any], bool] = {}

        def decide(kernel: Kernel, problem: Any) -> bool:
            fused[kernel.name, problem] = self.fuses(kernel, problem)
            return fused[kernel.name, problem]

        return launch_counts(self.model, self.step, self.target.arch, decide), fused

    @cached_property
    def _points(self) -> tuple[StepPoint, ...]:
        return tuple(
            StepPoint(name, p, count, self._us(name, p), self.repeat.times(name, p))
            for (name, p), count in self._calls[0].items()
        )

    def _us(self, name: str, problem: Any) -> float:
        """By the cost model, of the default: it orders what is looked at, and decides nothing."""
        kernel = find_kernel(name)
        return lower_bound_us(kernel, problem, kernel.default_config(problem, self.target), self.target)

    def points(self) -> tuple[StepPoint, ...]:
        return self._points

    def compare(self, base: Choice, other: Choice, *, pairs: int, within_s: float = inf) -> Ratio:
        """As StepTimer. Raises LaunchError where the step does not run with one of them, or does not fit."""
        seen = self.worker.compare(
            self.model, self.step, _exchanged(base), _exchanged(other), pairs=pairs, within_s=within_s,
            fused=self._calls[1],
        )  # fmt: skip
        if isinstance(seen, Ratio):
            return seen
        raise LaunchError(f"{self.step.name}: {seen.reason}")


def _exchanged(choice: Choice) -> list[Exchanged]:
    from kerngen.tuning.step_worker import Exchanged  # which loads torch

    return [Exchanged(point.kernel, (point.problem,), config, image) for point, (config, image) in choice.items()]


def timed_steps(worker: GpuWorker, model: Model, load: Workload, fuses: Fuses | None = None) -> Sequence[TimedStep]:
    """The steps by which a tune of `load`, a workload of `model` on the worker's GPU, is judged. fuses: decides where
    they ask one kernel in place of several; None: the default configurations do.
    """
    target = worker.target()
    fuses = fuses or default_selector(target).fuses
    found = []
    for weighed in steps_for(load):
        short, repeat = shortened(model, weighed.step, target.arch, fuses)
        timer = GpuTimer(worker, short, weighed.step, target, repeat, fuses)
        found.append(TimedStep(_key(model.name, weighed.step, weighed.weight, target, repeat), timer))
    return found


def _key(model: str, step: Step, weight: float, target: Target, repeat: Repeat) -> StepKey:
    launches = sorted((kernel, describe(problem), counts) for (kernel, problem), counts in repeat.counts.items())
    return StepKey(model, target.arch.name, step.phase, step.batch, step.q_len, step.context, step.chunk,
                   len(repeat.layers), digest(launches), weight, {"of_layers": repeat.num_layers})  # fmt: skip
