"""Chooses among a few configurations by the cost model, before any of them is compiled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kerngen.arch import Target
from kerngen.compiler.compile import Resources
from kerngen.cost.predict import Predictor
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
