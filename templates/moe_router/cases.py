"""Shapes that tests, bench and tuner share: edges first, then the model's own.

Logits that lie close to each other, or to where a rounding turns, may be ordered either way by a sum in another order.
So W is random and the residual is made for it: its logits are the ones that were drawn, with the chosen ones apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.rows.torch_rows import DTYPE_PAIRS, TORCH_DTYPE, Draw, poisoned
from kerngen.templates.kernel import Case
from kerngen.templates.moe_router.spec import Problem


def case_for(problem: Problem, **options: Any) -> Case:
    p = problem
    name = "_".join([f"h{p.hidden}_e{p.num_experts}_k{p.top_k}_{p.residual_dtype}-{p.dtype}", *options.values()])
    return Case(f"{name}_t{p.num_tokens}", p, p.hidden + p.num_experts + p.num_tokens, options)


def _cases(hidden: int, num_experts: int, top_k: int, *tokens: int, **options: Any) -> tuple[Case, ...]:
    return tuple(
        case_for(Problem(hidden, num_experts, top_k, d, r, t), **options) for d, r in DTYPE_PAIRS for t in tokens
    )


CASES = (
    *_cases(72, 8, 2, 1, 5),  # half of a fragment's experts; nine vectors: a step with one of four chunks
    *_cases(264, 24, 3, 9),  # nothing divides
    *_cases(512, 40, 8, 1, 17),  # two a lane, the last lanes empty
    *_cases(1024, 256, 8, 3, 33),
    *_cases(2816, 128, 8, 1, 2, 7, 8, 9, 16, 31, 64, 65, 300, 1025),
    *_cases(2816, 128, 8, 6, kind="nan"),
    *_cases(2816, 128, 8, 5, kind="zeros"),
    case_for(Problem(3840, 128, 4, "fp16", "fp16", 12)),
)


def _residual(problem: Problem, draw: Draw, router: Tensor, router_scale: Tensor, levels: Tensor) -> Tensor:
    """[num_tokens, hidden] fp64, of mean square 1, whose logits are `levels` [num_tokens, num_experts]."""
    p = problem
    w = router.double()
    inverse = torch.linalg.inv(w @ w.T)
    t = levels @ inverse @ w  # the shortest with these logits
    other = draw.normal(p.num_tokens, p.hidden, dtype="fp32").double()
    other = other - other @ w.T @ inverse @ w  # without effect on the logits
    factor = router_scale.double() * p.hidden**-0.5
    t, other = t / factor, other / factor
    # The norm must be 1, so that it leaves the logits alone: |t + b other|^2 = hidden.
    a, half_b, c = (other * other).mean(1), (t * other).mean(1), (t * t).mean(1) - 1
    b = (-half_b + (half_b * half_b - a * c).sqrt()) / a
    return t + b[:, None] * other


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument but the workspace. The chosen logits are 7.75, 7.25 and on, the others in -2..2; x is below 1.

    options["kind"]: "nan" has a token with a NaN and one with an infinity, whose weights are NaN and which must not
    touch their neighbours; "zeros" a token of zeros, whose logits are all equal. Outputs are poison.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    levels = draw.normal(p.num_tokens, p.num_experts, dtype="fp32").double().clamp(-2, 2)
    chosen = torch.stack([draw.permutation(p.num_experts)[: p.top_k] for _ in range(p.num_tokens)])
    steps = 7.75 - 0.5 * torch.arange(p.top_k, dtype=torch.float64, device=device)
    levels.scatter_(1, chosen, steps.expand(p.num_tokens, -1))
    # W just large enough that tokens of norm 1 reach such logits.
    w_std = max(1.0, float(levels.pow(2).sum(1).max() / (0.4 * p.hidden)) ** 0.5)
    router = draw.normal(p.num_experts, p.hidden, dtype=p.dtype, std=w_std)
    router_scale = draw.normal(p.hidden, dtype=p.dtype, mean=1.0, std=0.1)
    residual = _residual(p, draw, router, router_scale, levels)
    match case.options.get("kind", ""):
        case "nan":
            residual[1, 5], residual[3, -1] = float("nan"), float("inf")
        case "zeros":
            residual[2] = 0
    shape = p.num_tokens, p.top_k
    return {
        "topk_ids": torch.full(shape, -(2**30), dtype=torch.int32, device=device),
        "topk_weights": torch.full(shape, -1e30, device=device),  # not NaN, which a case expects
        "x": poisoned(p.num_tokens, p.hidden, dtype=p.dtype, device=device, value=-1e4),
        "residual": residual.to(TORCH_DTYPE[p.residual_dtype]),
        "router_scale": router_scale,
        "router": router,
        "per_expert_scale": draw.normal(p.num_experts, dtype=p.dtype, mean=1.0, std=0.2),
        "pre_norm": draw.normal(p.hidden, dtype=p.dtype, mean=0.1, std=0.02),
        "eps": 1e-6,
        "num_tokens": p.num_tokens,
    }
