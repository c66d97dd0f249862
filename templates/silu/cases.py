"""Shapes that tests, bench and tuner share: edges first, then the models' own rows."""

from __future__ import annotations

import math
from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import Draw
from kerngen.templates.kernel import Case, asking
from kerngen.templates.silu.op import bounded_silu
from kerngen.templates.silu.spec import Problem


def case_for(problem: Problem, **options: Any) -> Case:
    """options: kind of the bounds: open, all infinite."""
    p = problem
    return Case("_".join((f"w{p.width}", p.dtype, *options.values(), f"t{p.num_tokens}")), p, p.width + p.num_tokens,
                options)  # fmt: skip


CASES = (
    *(
        case_for(Problem(width, dtype, t))
        for width, tokens in ((8, (1, 3, 700)), (1000, (3, 129)), (4096, (1, 33)))
        for dtype in ("bf16", "fp16")
        for t in tokens
    ),
    case_for(Problem(256, num_tokens=5), kind="open"),
    case_for(Problem(256, "fp16", num_tokens=5), kind="open"),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. x normal, and wide enough for both tails."""
    p: Problem = case.problem
    x = Draw(case.seed, device).normal(p.num_tokens, p.width, dtype=p.dtype, std=2.0)
    x[0, :4] = torch.tensor([0.0, -0.0, 40.0, -40.0], device=device)
    bounds = [[-math.inf, math.inf]] * 2 if case.options else [[-1.5, 3.0], [-math.inf, 2.5]]
    return {"x": x, "bounds": torch.tensor(bounds, device=device), "num_tokens": p.num_tokens}


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    return asking(bounded_silu, case, inputs)
