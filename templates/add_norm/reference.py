"""The model's steps in torch, each computed in fp32 and rounded where the model rounds.

Source: Gemma4TextDecoderLayer.forward in transformers 5.22, modeling_gemma4.py: the norm gives a tensor of the
activations' dtype, the sum and the product with layer_scalar are tensors of the stream's dtype, and the next norm
reads that.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.add_norm.spec import Problem
from kerngen.templates.common.rows.torch_rows import rms_norm, rounded, tolerance_of_flips
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """residual_out and, with has_next, out: [num_tokens, hidden] in fp32, holding values of their dtypes."""
    p = problem
    h = inputs["h"].float()
    if p.has_bounds:
        of_h, of_out = inputs["bounds"].tolist()
        h = h.clamp(*of_h)
    if p.has_post:
        h = rounded(rms_norm(h, inputs["post_weight"], inputs["eps"]), p.dtype)
    stream = rounded(inputs["residual"].float() + h, p.residual_dtype)
    if p.has_scalar:
        stream = rounded(stream * inputs["layer_scalar"].float(), p.residual_dtype)
    results = {"residual_out": stream}
    if p.has_next:
        out = rounded(rms_norm(stream, inputs["next_weight"], inputs["eps"]), p.dtype)
        results["out"] = out.clamp(*of_out) if p.has_bounds else out
    return results


def tolerance(problem: Problem) -> Tolerance:
    """Flips of the norm (absolute in the sum, whose terms may cancel), of the sum, of the product, of the result."""
    return tolerance_of_flips(problem.dtype, 2.0, 2)
