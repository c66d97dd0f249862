"""Shapes that tests, bench and tuner share: edges first, then the model's own."""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.common.rows.torch_rows import DTYPE_PAIRS, TORCH_DTYPE, Draw
from kerngen.templates.kernel import Case
from kerngen.templates.moe_route.spec import Problem


def case_for(problem: Problem, **options: Any) -> Case:
    p = problem
    name = "_".join([f"e{p.num_experts}_k{p.top_k}_{p.logits_dtype}", *options.values(), f"t{p.num_tokens}"])
    return Case(name, p, p.num_experts + p.num_tokens, options)


def _cases(num_experts: int, top_k: int, *tokens: int, kinds: tuple[str, ...] = ("normal",)) -> tuple[Case, ...]:
    return tuple(
        case_for(Problem(num_experts, top_k, d, ld, t), kind=k) for d, ld in DTYPE_PAIRS for k in kinds for t in tokens
    )


CASES = (
    *_cases(1, 1, 1, 5),
    *_cases(3, 3, 2, kinds=("normal", "equal")),  # every expert chosen, most lanes empty
    *_cases(32, 8, 9),
    *_cases(33, 2, 7, kinds=("normal", "ties")),  # two a lane, the last lanes empty
    *_cases(60, 4, 5),
    *_cases(128, 8, 1, 7, 513, kinds=("normal", "ties", "equal", "wide")),
    *_cases(128, 8, 6, kinds=("nan", "infinite", "zeros")),
    *_cases(160, 6, 5, kinds=("normal", "ties")),
    *_cases(256, 8, 1, 33, kinds=("normal", "ties", "equal")),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. logits normal, and by options["kind"]:

    ties: rounded to quarters, so that many are equal; equal: all the same; wide: up to +-300, so that most weights are
    0; nan: one NaN a row; infinite: all but five minus infinity; zeros: +0 and -0 mixed, which are equal. Outputs are
    poison.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    logits = draw.normal(p.num_tokens, p.num_experts, dtype="fp32")
    match case.options.get("kind", "normal"):
        case "ties":
            logits = (logits * 4).round() / 4
        case "equal":
            logits[:] = 1.5
        case "wide":
            logits *= 100
        case "nan":
            logits[torch.arange(p.num_tokens), draw.integers(0, p.num_experts, p.num_tokens)] = -float("nan")
        case "infinite":
            logits[:, torch.arange(p.num_experts) % (p.num_experts // 5) != 3] = -float("inf")
        case "zeros":
            logits = torch.where(logits > 0, 0.0, -0.0)
    shape = p.num_tokens, p.top_k
    return {
        "topk_ids": torch.full(shape, -(2**30), dtype=torch.int32, device=device),
        "topk_weights": torch.full(shape, -1e30, device=device),  # not NaN, which a case expects
        "logits": logits.to(TORCH_DTYPE[p.logits_dtype]),
        "per_expert_scale": draw.normal(p.num_experts, dtype=p.dtype, mean=1.0, std=0.2),
        "num_tokens": p.num_tokens,
    }
