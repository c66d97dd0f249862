"""The router's steps in torch, each computed in fp32 and rounded where the model rounds.

Source: Gemma4TextRouter.forward and Gemma4TextDecoderLayer.forward in transformers 5.22, modeling_gemma4.py: the norm
without weight, the product with `scale` and the product with hidden_size^-0.5 are tensors of the activations' dtype, so
are the logits; from there as moe_route's reference. The experts read the residual through a norm of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.rows.torch_rows import UNIT, rms_norm, rounded
from kerngen.templates.kernel import Tolerance
from kerngen.templates.moe_router.spec import Problem


def router_logits(problem: Problem, inputs: dict[str, Any]) -> Tensor:
    """[num_tokens, num_experts] in fp32, before they are rounded to dtype."""
    p = problem
    t = rounded(rms_norm(inputs["residual"], None, inputs["eps"]), p.dtype)
    t = rounded(t * inputs["router_scale"].float(), p.dtype)
    t = rounded(t * p.hidden**-0.5, p.dtype)
    return t @ inputs["router"].float().T


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """topk_ids, topk_weights: [num_tokens, top_k] in fp32, in falling order of logit, the lower id first on a tie;
    x: [num_tokens, hidden] in fp32, holding values of dtype."""
    p = problem
    logits = rounded(router_logits(p, inputs), p.dtype)
    logits = torch.where(logits.isnan(), float("nan"), logits)  # torch sorts a negative NaN last on a GPU
    logits, ids = logits.sort(dim=-1, descending=True, stable=True)
    logits, ids = logits[:, : p.top_k], ids[:, : p.top_k]
    weights = torch.softmax(logits, dim=-1) * inputs["per_expert_scale"].float()[ids]
    x = rounded(rms_norm(inputs["residual"], inputs["pre_norm"], inputs["eps"]), p.dtype)
    return {"topk_ids": ids.float(), "topk_weights": weights, "x": x}


def tolerance(problem: Problem) -> Tolerance:
    """Absolute and below 1/2, so that ids must be exact."""
    return Tolerance(
        1.25 * UNIT[problem.dtype],
        0.0,
        "one flipped rounding of x, below 1 in cases.py; the chosen logits lie in the middle between two roundings "
        "and apart from each other, so that ids are exact and weights differ by the exponential's error alone",
    )
