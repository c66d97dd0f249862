"""Features of a configuration for the learner: its tunables, and figures that the cost model derives from them.

Times multiply, so everything that counts something is a logarithm; all columns are scaled to 0..1 over the
configurations at hand, and those that say nothing there are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import log, log2, prod
from typing import TYPE_CHECKING, Any

from kerngen.arch import Target
from kerngen.cost.predict import Prediction, Predictor
from kerngen.templates.kernel import Kernel
from kerngen.tuning.field_tracing import Remembered
from kerngen.tuning.plan import GUESSED_REGISTERS
from kerngen.tuning.space import Candidates

if TYPE_CHECKING:
    from numpy import ndarray


@dataclass(frozen=True, eq=False)
class Described:
    """Configurations as a learner sees them. features [configs, columns] are 0..1; model [configs] is the logarithm of
    the microseconds that the cost model says before any compile.
    """

    configs: tuple[Any, ...]
    features: ndarray
    model: ndarray


def described(kernel: Kernel, problem: Any, target: Target, configs: Sequence[Any], registers: int = 0) -> Described:
    """registers: a thread's, of a compiled kernel of this problem; 0 where there is none yet."""
    return Described(tuple(configs), *_columns(kernel, problem, target, configs, registers or GUESSED_REGISTERS))


def described_space(found: Candidates, registers: int = 0) -> Described:
    """All that a search may ask for."""
    return described(found.kernel, found.problem, found.target, found.askable, registers)


def _columns(
    kernel: Kernel, problem: Any, target: Target, configs: Sequence[Any], registers: int
) -> tuple[ndarray, ndarray]:
    import numpy as np

    predictor = Predictor(kernel, problem, target)

    def derived(config: Any) -> tuple[float, ...]:
        prediction = predictor.predict(config, registers=registers)
        return log(prediction.latency_us), *_derived(kernel, problem, target, config, prediction)

    of = Remembered(kernel.config_type, derived)  # much of a space differs in what neither sees
    rows = np.array([of(c) for c in configs], dtype=float)
    model = rows[:, 0]
    table = np.hstack([np.array(_tunables(configs), dtype=float).T, rows])  # [configs, columns]
    low, high = table.min(0), table.max(0)
    table = (table - low)[:, high > low] / (high - low)[high > low]
    return table, model


def _tunables(configs: Sequence[Any]) -> list[list[float]]:
    columns = []
    for name in (f.name for f in fields(configs[0])):
        values = [getattr(c, name) for c in configs]
        if all(isinstance(v, int | float) for v in values):
            columns.append([log2(1 + v) if v >= 0 else float(v) for v in values])
        else:
            columns += [[float(v == one) for v in values] for one in sorted(set(values), key=str)]
    return columns


def _derived(kernel: Kernel, problem: Any, target: Target, config: Any, prediction: Prediction) -> tuple[float, ...]:
    """Of the launch that takes longest: how it fills the GPU, and how a wave ends."""
    at, main = max(enumerate(prediction.launches), key=lambda x: x[1].latency_us)
    launch = kernel.launches(problem, config, target)[at]
    warps = prod(launch.block) / 32
    resident = max(1.0, min(main.blocks_per_sm, main.blocks / target.device.num_sms))
    return (
        log2(main.blocks), log2(warps), log2(1 + main.blocks_per_sm), log2(warps * resident),
        log2(1024 + main.smem_bytes), log2(1024 + main.smem_bytes * resident),
        min(main.waves, 8.0), -(-main.waves // 1) / main.waves,  # of its waves, whole ones to real ones
        *(float(main.bound == b) for b in ("memory", "l2", "smem", "tensor", "issue", "launch")),
    )  # fmt: skip
