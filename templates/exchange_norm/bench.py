"""What exchange_norm is timed on, where one GPU is all ranks, and add_norm's own time in eager torch beside it.

What an exchange between GPUs takes is timed by `python -m tools.bench_exchange`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from kerngen.templates.exchange_norm.cases import case_for
from kerngen.templates.exchange_norm.spec import Problem
from kerngen.templates.kernel import Case

BENCH_CASES: tuple[Case, ...] = (
    *(case_for(Problem(ranks, num_tokens=t)) for ranks in (2, 4) for t in (1, 4, 8, 32, 128, 512)),
    *(case_for(Problem(2, 2816, top_k=8, has_scalar=True, num_tokens=t)) for t in (1, 32)),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """torch: the same steps around torch's fused rms_norm, without an exchange."""
    p: Problem = case.problem

    def norm(x: Tensor, weight: str) -> Tensor:
        return torch_rms_norm(x, (p.hidden,), inputs[weight], inputs["eps"])

    def run() -> Tensor:
        h = inputs["h"] * p.ranks
        if p.top_k:
            experts = (inputs["routed"].float() * inputs["topk_weights"][..., None]).sum(1).to(h.dtype)
            h = norm(h, "h_norm") + norm(experts * p.ranks, "routed_norm")
        stream = inputs["residual"] + norm(h, "post_weight")
        if p.has_scalar:
            stream = stream * inputs["layer_scalar"]
        return norm(stream, "next_weight") if p.has_next else stream

    return {"torch": run} if p.dtype == p.residual_dtype else {}
