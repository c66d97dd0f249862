"""RMS norm in fp32 torch, rounded once at the end. Source: Gemma4RMSNorm in transformers 5.22, modeling_gemma4.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.common.rows.torch_rows import rms_norm, rounded, tolerance_of_flips
from kerngen.templates.kernel import Tolerance
from kerngen.templates.rmsnorm.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """out [num_tokens, hidden] in fp32, holding values of dtype."""
    return {"out": rounded(rms_norm(inputs["x"], inputs["weight"], inputs["eps"]), problem.dtype)}


def tolerance(problem: Problem) -> Tolerance:
    """One flipped rounding; nothing absolute but what a zero needs."""
    return tolerance_of_flips(problem.dtype, 2.0**-14, 1)
