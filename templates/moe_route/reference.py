"""Top-k routing in fp32 torch. Source: Gemma4TextRouter.forward in transformers 5.22, modeling_gemma4.py: softmax over
all experts, the k greatest, renormalised to sum 1, then times per_expert_scale. Renormalising cancels the softmax's
own denominator, so the k weights are the softmax of the k greatest logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.kernel import Tolerance
from kerngen.templates.moe_route.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """topk_ids, topk_weights: [num_tokens, top_k] in fp32, in falling order of logit, the lower id first on a tie."""
    p = problem
    logits = inputs["logits"].float()
    logits = torch.where(logits.isnan(), float("nan"), logits)  # torch sorts a negative NaN last on a GPU
    logits, ids = logits.sort(dim=-1, descending=True, stable=True)
    logits, ids = logits[:, : p.top_k], ids[:, : p.top_k]
    weights = torch.softmax(logits, dim=-1) * inputs["per_expert_scale"].float()[ids]
    return {"topk_ids": ids.float(), "topk_weights": weights}


def tolerance(problem: Problem) -> Tolerance:
    """Absolute and below 1/2, so that ids must be exact; weights are at most about 2."""
    return Tolerance(4e-6, 0.0, "the exponential's error of 2^-21 and the sum's order, on weights up to 2")
