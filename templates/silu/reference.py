"""clamp, SiLU and clamp in fp32 torch, rounded once.

Source: Gemma4AudioFeedForward and Gemma4ClippableLinear of transformers 5.22, modeling_gemma4.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import silu

from kerngen.templates.common.rows.torch_rows import UNIT, rounded
from kerngen.templates.kernel import Tolerance
from kerngen.templates.silu.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """x [num_tokens, width] in fp32, holding values of dtype."""
    before, after = inputs["bounds"].tolist()
    return {"x": rounded(silu(inputs["x"].float().clamp(*before)), problem.dtype).clamp(*after)}


def tolerance(problem: Problem) -> Tolerance:
    """A flipped rounding; and for what fp16 holds below its normal numbers, one of their steps."""
    return Tolerance(2.0**-24, 2 * UNIT[problem.dtype], f"a flipped rounding to {problem.dtype}")
