"""Times configurations by the cost model before any of them is compiled, and chooses among a few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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
    times: dict[Any, Callable[[Any], float]] = {}

    def us(config: Any) -> float:
        asked, timed = kernel.ranked_as(problem, config)
        if asked not in times:
            times[asked] = expected_times(kernel, asked, target, GUESSED_REGISTERS)
        return times[asked](timed)

    return [(us(config), config) for config in configs]


def expected_times(kernel: Kernel, problem: Any, target: Target, guess: int | None) -> Callable[[Any], float]:
    """By configuration, the microseconds that it is expected to be predicted to take once it is compiled: with the
    registers that its spec expects. guess: a thread's, where the spec says nothing; None: as few as there can be.
    """
    predictor = Predictor(kernel, problem, target)

    def us(config: Any) -> float:
        registers = kernel.expected_registers(problem, config, target) or guess
        if isinstance(registers, Mapping):
            takes = {entry: Resources(n, 0, 0, 0, 0) for entry, n in registers.items()}
            return predictor.predict(config, takes).latency_us
        if registers is not None:
            registers = min(registers, target.arch.max_regs_per_thread)
        return predictor.predict(config, registers=registers).latency_us

    return us


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
