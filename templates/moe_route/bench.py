"""What moe_route is timed on, and the model's own operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kerngen.templates.kernel import Case
from kerngen.templates.moe_route.cases import case_for
from kerngen.templates.moe_route.spec import Problem

BENCH_CASES: tuple[Case, ...] = (
    *(case_for(Problem(num_tokens=t)) for t in (1, 4, 32, 4096)),
    *(case_for(Problem(256, 8, num_tokens=t)) for t in (1, 4096)),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: softmax, top-k, renormalise, scale."""
    p: Problem = case.problem

    def eager() -> torch.Tensor:
        weights, ids = torch.softmax(inputs["logits"], dim=-1, dtype=torch.float32).topk(p.top_k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        return weights * inputs["per_expert_scale"][ids]

    return {"eager": eager}
