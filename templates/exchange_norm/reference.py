"""The model's steps in torch on the sum of the ranks' rows, each computed in fp32 and rounded where the model rounds.

Source: Gemma4TextDecoderLayer.forward in transformers 5.22, modeling_gemma4.py, as add_norm and moe_combine. The sum is
made in fp32, in the order of the ranks, and rounded once, as `Collectives.all_reduce` says. Each rank's sum of
experts is rounded before, as moe_combine's reference does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kerngen.templates.common.rows.torch_rows import add_normed, rms_norm, rounded, tolerance_of_flips
from kerngen.templates.exchange_norm.spec import Problem
from kerngen.templates.kernel import Tolerance
from kerngen.templates.moe_combine.reference import routed_sum


def summed(parts: Sequence[Tensor], dtype: str) -> Tensor:
    """The sum of the ranks' rows, fp32 values of `dtype`."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return rounded(total, dtype)


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """As `expected_of` where every rank has these rows: what a launch gives that is its own peers (cases.py)."""
    return expected_of(problem, [inputs] * problem.ranks)


def expected_of(problem: Problem, of_ranks: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """residual_out and, with has_next, out: [num_tokens, hidden] in fp32, holding values of their dtypes.

    of_ranks: every argument of the first; of the others h and, with top_k, routed and topk_weights.
    """
    p, inputs = problem, of_ranks[0]
    eps = inputs["eps"]
    total = summed([of["h"] for of in of_ranks], p.dtype)
    if p.top_k:
        experts = [routed_sum(of["routed"], of["topk_weights"], p.dtype) for of in of_ranks]
        first = rounded(rms_norm(total, inputs["h_norm"], eps), p.dtype)
        other = rounded(rms_norm(summed(experts, p.dtype), inputs["routed_norm"], eps), p.dtype)
        total = rounded(first + other, p.dtype)
    stream = add_normed(inputs["residual"], total, inputs["post_weight"], eps, p.dtype, p.residual_dtype)
    if p.has_scalar:
        stream = rounded(stream * inputs["layer_scalar"].float(), p.residual_dtype)
    results = {"residual_out": stream}
    if p.has_next:
        results["out"] = rounded(rms_norm(stream, inputs["next_weight"], eps), p.dtype)
    return results


def tolerance(problem: Problem) -> Tolerance:
    """Flips of a norm or of their sum (absolute in the next sum, whose terms may cancel), of stream and result."""
    return tolerance_of_flips(problem.dtype, 2.0, 3 if problem.top_k else 2)
