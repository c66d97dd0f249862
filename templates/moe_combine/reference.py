"""The model's steps in torch, each computed in fp32 and rounded where the model rounds.

Source: Gemma4TextDecoderLayer.forward in transformers 5.22, modeling_gemma4.py, from the outputs of the MLP and of the
experts on. transformers rounds each product with a weight, and their sum after every expert, in an order that it finds;
here the products are summed in fp32, in the order of topk_weights, and rounded once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.common.rows.torch_rows import rms_norm, rounded, tolerance_of_flips
from kerngen.templates.kernel import Tolerance
from kerngen.templates.moe_combine.spec import Problem


def routed_sum(routed: Tensor, topk_weights: Tensor, dtype: str) -> Tensor:
    """routed [T, k, H] weighted by topk_weights [T, k] and added in fp32: [T, H] in fp32, holding values of `dtype`."""
    return rounded((routed.float() * topk_weights[..., None]).sum(1), dtype)


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """residual_out, with has_norms, and out: [num_tokens, hidden] in fp32, holding values of their dtypes."""
    p = problem
    if not p.has_norms:
        return {"out": routed_sum(inputs["routed"], inputs["topk_weights"], p.dtype)}

    def norm(x: Tensor, weight: str) -> Tensor:
        return rounded(rms_norm(x, inputs[weight], inputs["eps"]), p.dtype)

    routed = routed_sum(inputs["routed"], inputs["topk_weights"], p.dtype)
    h = rounded(norm(inputs["dense"], "dense_norm") + norm(routed, "routed_norm"), p.dtype)
    stream = rounded(inputs["residual"].float() + norm(h, "post_norm"), p.residual_dtype)
    stream = rounded(stream * inputs["layer_scalar"].float(), p.residual_dtype)
    return {"residual_out": stream, "out": norm(stream, "next_norm")}


def tolerance(problem: Problem) -> Tolerance:
    """Flips of a norm or of their sum (absolute in the next sum, whose terms may cancel), of stream and result."""
    return tolerance_of_flips(problem.dtype, 2.0, 3)
