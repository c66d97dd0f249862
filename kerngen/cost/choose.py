"""Chooses among a few configurations by the cost model, before any of them is compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from kerngen.arch import Target
from kerngen.compiler.compile import Resources
from kerngen.cost.predict import FITTED, Predictor
from kerngen.errors import ProblemError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel

GUESSED_REGISTERS = 96  # of a thread, where neither a compiler nor the spec says


def fastest(kernel: Kernel, problem: Any, target: Target, configs: Iterable[Any]) -> Any:
    """Of `configs`, all valid and at least one, the one that is predicted to be the fastest; of equals the first."""
    return min(ranked(kernel, problem, target, configs), key=lambda timed: timed[0])[1]


def ranked(kernel: Kernel, problem: Any, target: Target, configs: Iterable[Any]) -> list[tuple[float, Any]]:
    """(predicted microseconds, configuration) of each, in the order given."""
    predictors: dict[Any, Predictor] = {}

    def us(config: Any) -> float:
        asked, timed = kernel.ranked_as(problem, config)
        registers = kernel.expected_registers(asked, timed, target) or GUESSED_REGISTERS
        predictor = predictors.setdefault(asked, Predictor(kernel, asked, target))
        if isinstance(registers, int):
            return predictor.predict(timed, registers=registers).latency_us
        takes = {entry: Resources(n, 0, 0, 0, 0) for entry, n in registers.items()}
        return predictor.predict(timed, takes).latency_us

    return [(us(config), config) for config in configs]


def fused_is_faster(kernel: Kernel, problem: Any, config: Any, target: Target) -> bool:
    """Whether a step with `config` is predicted to take no longer than with the kernels that `kernel` replaces, each by
    its default. True too where one of those does not serve its part.
    """
    try:
        replaced = Counter(kernel.replaces(problem))
        apart = sum(n * _default_us(*each, target) for each, n in replaced.items())
    except ProblemError:
        return True
    launch = FITTED["steps", "launch"]
    more = launch.offset_us * (replaced.total() - 1) if target.arch.name in launch.arches else 0.0
    return ranked(kernel, problem, target, [config])[0][0] <= apart + more


@lru_cache(maxsize=4096)
def _default_us(name: str, problem: Any, target: Target) -> float:
    kernel = find_kernel(name)
    if (why := kernel.why_unsupported(problem, target)) is not None:
        raise ProblemError(why)
    return ranked(kernel, problem, target, [kernel.default_config(problem, target)])[0][0]
