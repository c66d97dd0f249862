"""What moe_router is timed on, and the model's own operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear
from torch.nn.functional import rms_norm as torch_rms_norm

from kerngen.templates.kernel import Case
from kerngen.templates.moe_router.cases import case_for
from kerngen.templates.moe_router.spec import Problem

BENCH_CASES: tuple[Case, ...] = tuple(case_for(Problem(num_tokens=t)) for t in (1, 4, 8, 32, 64, 256, 1024, 4096))


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """torch: the model's own sequence of operations around torch's fused rms_norm and cuBLAS."""
    p: Problem = case.problem
    residual, eps, shape = inputs["residual"], inputs["eps"], (case.problem.hidden,)

    def run() -> object:
        t = torch_rms_norm(residual, shape, None, eps).to(inputs["router"].dtype)
        logits = linear(t * inputs["router_scale"] * p.hidden**-0.5, inputs["router"])
        weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(p.top_k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        return weights * inputs["per_expert_scale"][ids], torch_rms_norm(residual, shape, inputs["pre_norm"], eps)

    return {"torch": run} if p.dtype == p.residual_dtype else {}
