"""Gemma-4 31B's projections that a norm follows, for two to eight tokens.

There is no torch baseline: docs/experiments.md compares them with w4a16_gemm and add_norm in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerngen.templates.kernel import Case
from kerngen.templates.w4a16_norm.cases import case_for
from kerngen.templates.w4a16_norm.spec import Problem

BENCH_CASES: tuple[Case, ...] = tuple(
    case_for(Problem(5376, k, has_scalar=k == 21504, num_tokens=t)) for t in (2, 4, 8) for k in (8192, 16384, 21504)
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    return {}
