"""What a learner sees of a configuration: its tunables, and what the cost model derives from them.

Times multiply, so everything that counts something is a logarithm; all columns are scaled to 0..1 over the
configurations at hand, and those that say nothing there are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, log2, prod
from typing import TYPE_CHECKING, Any

from kerngen.arch import Target
from kerngen.predict import Prediction, predict
from kerngen.templates.kernel import Kernel, fields_of

if TYPE_CHECKING:
    from numpy import ndarray


def described(
    kernel: Kernel, problem: Any, target: Target, configs: Sequence[Any], registers: int
) -> tuple[ndarray, ndarray]:
    """(features [configs, columns], log of the microseconds that the cost model says before any compile [configs])."""
    import numpy as np

    predicted = [predict(kernel, problem, c, target, registers=registers) for c in configs]
    columns = _tunables(configs)
    columns += _derived(kernel, problem, target, configs, predicted)
    model = np.array([log(p.latency_us) for p in predicted])
    columns.append([float(m) for m in model])
    table = np.array(columns, dtype=float).T  # [configs, columns]
    low, high = table.min(0), table.max(0)
    table = (table - low)[:, high > low] / (high - low)[high > low]
    return table, model


def _tunables(configs: Sequence[Any]) -> list[list[float]]:
    fields = [fields_of(c) for c in configs]
    columns = []
    for name in fields[0]:
        values = [f[name] for f in fields]
        if all(isinstance(v, int | float) for v in values):
            columns.append([log2(1 + v) if v >= 0 else float(v) for v in values])
        else:
            columns += [[float(v == one) for v in values] for one in sorted(set(values), key=str)]
    return columns


def _derived(
    kernel: Kernel, problem: Any, target: Target, configs: Sequence[Any], predicted: Sequence[Prediction]
) -> list[list[float]]:
    """Of the launch that takes longest: how it fills the GPU, and how a wave ends."""
    rows = []
    for config, p in zip(configs, predicted, strict=True):
        at, main = max(enumerate(p.launches), key=lambda x: x[1].latency_us)
        launch = kernel.launches(problem, config, target)[at]
        warps = prod(launch.block) / 32
        resident = max(1.0, min(main.blocks_per_sm, main.blocks / target.device.num_sms))
        rows.append(
            [
                log2(main.blocks), log2(warps), log2(1 + main.blocks_per_sm), log2(warps * resident),
                log2(1024 + main.smem_bytes), log2(1024 + main.smem_bytes * resident),
                min(main.waves, 8.0), -(-main.waves // 1) / main.waves,  # of its waves, whole ones to real ones
                *(float(main.bound == b) for b in ("memory", "l2", "smem", "tensor", "issue", "launch")),
            ]
        )  # fmt: skip
    return [list(column) for column in zip(*rows, strict=True)]
