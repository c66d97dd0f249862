"""What moe_combine is timed on, and the model's own operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from kerngen.templates.kernel import Case
from kerngen.templates.moe_combine.cases import case_for
from kerngen.templates.moe_combine.spec import Problem

BENCH_CASES: tuple[Case, ...] = (
    *(case_for(Problem(num_tokens=t)) for t in (1, 4, 8, 32, 4096)),
    *(case_for(Problem(has_norms=False, num_tokens=t)) for t in (1, 32, 4096)),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """torch: the same steps around torch's fused rms_norm."""
    p: Problem = case.problem

    def norm(x: Tensor, weight: str) -> Tensor:
        return torch_rms_norm(x, (p.hidden,), inputs[weight], inputs["eps"])

    def routed_sum() -> Tensor:
        return (inputs["routed"] * inputs["topk_weights"][..., None]).sum(1).to(inputs["routed"].dtype)

    def run() -> Tensor:
        routed = routed_sum()
        h = norm(norm(inputs["dense"], "dense_norm") + norm(routed, "routed_norm"), "post_norm")
        return norm((inputs["residual"] + h) * inputs["layer_scalar"], "next_norm")

    if not p.has_norms:
        return {"torch": routed_sum}
    return {"torch": run} if p.dtype == p.residual_dtype else {}
