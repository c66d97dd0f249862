"""The model's steps in torch, each computed in fp32 and rounded where the model rounds.

Source: Gemma4AudioLayer, Gemma4AudioFeedForward and Gemma4ClippableLinear of transformers 5.22, modeling_gemma4.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.common.rows.torch_rows import rms_norm, rounded, tolerance_of_flips
from kerngen.templates.kernel import Tolerance
from kerngen.templates.residual_norms.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """residual and out [num_tokens, hidden] in fp32, holding values of dtype."""
    p = problem
    of_h, of_norms, of_out = inputs["bounds"].tolist()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rounded(rms_norm(x, weight, inputs["eps"]), p.dtype)

    h = inputs["h"].float().clamp(*of_h)
    if p.has_post:
        h = norm(h, inputs["post_weight"])
    residual = rounded(inputs["residual"].float() + h, p.dtype)
    out = norm(residual.clamp(*of_norms), inputs["next_weight"])
    if p.has_last:
        residual = out
        out = norm(residual.clamp(*of_norms), inputs["last_weight"])
    return {"residual": residual, "out": out.clamp(*of_out)}


def tolerance(problem: Problem) -> Tolerance:
    """Flips of the first norm (absolute in the sum, whose terms may cancel), of the sum, and of the norms behind it."""
    return tolerance_of_flips(problem.dtype, 2.0, 2 + problem.has_last)
