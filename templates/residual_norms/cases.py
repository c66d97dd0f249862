"""Shapes that tests, bench and tuner share: edges first, then the models' own rows."""

from __future__ import annotations

import math
from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.kernel import Case, asking
from kerngen.templates.residual_norms.op import residual_norms
from kerngen.templates.residual_norms.spec import Problem


def case_for(problem: Problem, **options: Any) -> Case:
    """options: kind: open, where no bound is finite, or huge, where sum and h overflow the dtype unless clamped."""
    p = problem
    words = (*["no-post"] * (not p.has_post), *["last"] * p.has_last, *options.values())
    return Case("_".join((f"h{p.hidden}_{p.dtype}", *words, f"t{p.num_tokens}")), p, p.hidden + p.num_tokens, options)


CASES = (
    *(
        case_for(Problem(hidden, dtype, has_post, has_last, t))
        for hidden, tokens in ((8, (1, 3)), (264, (5,)), (1024, (1, 33)))
        for dtype in ("bf16", "fp16")
        for has_post, has_last in ((True, False), (True, True), (False, False))
        for t in tokens
    ),
    case_for(Problem(1544, has_last=True, num_tokens=3)),  # 193 vectors
    case_for(Problem(1544, "fp16", has_post=False, has_last=True, num_tokens=3)),
    case_for(Problem(256, num_tokens=5), kind="open"),
    case_for(Problem(256, "fp16", num_tokens=5), kind="huge"),
    case_for(Problem(256, "fp16", has_post=False, num_tokens=5), kind="huge"),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. residual and h normal, weights about 1; out is NaN."""
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    kind = case.options.get("kind", "")
    bounds = [[-0.5, 0.75], [-2.0, 1.75], [-math.inf, 1.5]]
    if kind == "open":
        bounds = [[-math.inf, math.inf]] * 3
    h = draw.normal(p.num_tokens, p.hidden, dtype=p.dtype, std=0.5)
    residual = draw.normal(p.num_tokens, p.hidden, dtype=p.dtype)
    if kind == "huge":
        bounds = [[-65504.0, 65504.0]] * 2 + [[-math.inf, math.inf]]
        h[0, :2] = torch.tensor([math.inf, -math.inf], device=device)
        residual[1, :2] = torch.tensor([math.inf, 60000.0], device=device)
        h[1, 1] = 60000.0

    def weight(wanted: bool = True) -> torch.Tensor | None:
        return draw.normal(p.hidden, dtype=p.dtype, mean=1.0, std=0.25) if wanted else None

    return {
        "residual": residual,
        "out": poisoned(p.num_tokens, p.hidden, dtype=p.dtype, device=device),
        "h": h,
        "post_weight": weight(p.has_post),
        "next_weight": weight(),
        "last_weight": weight(p.has_last),
        "bounds": torch.tensor(bounds, device=device),
        "eps": 1e-6,
        "num_tokens": p.num_tokens,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    return asking(residual_norms, case, inputs)
