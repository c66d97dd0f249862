"""What rmsnorm is timed on, and torch's own beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.functional import rms_norm as torch_rms_norm

from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE, rms_norm
from kerngen.templates.kernel import Case
from kerngen.templates.rmsnorm.cases import case_for
from kerngen.templates.rmsnorm.spec import Problem

BENCH_CASES: tuple[Case, ...] = tuple(case_for(Problem(num_tokens=t)) for t in (1, 4, 32, 4096))


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: the model's own sequence of operations. torch: the fused rms_norm, which takes one dtype."""
    p, x, weight, eps = case.problem, inputs["x"], inputs["weight"], inputs["eps"]
    found: dict[str, Callable[[], object]] = {"eager": lambda: rms_norm(x, weight, eps).to(TORCH_DTYPE[p.dtype])}
    if p.dtype == p.residual_dtype:
        found["torch"] = lambda: torch_rms_norm(x, (p.hidden,), weight, eps)
    return found
