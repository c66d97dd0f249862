"""Shapes that tests, bench and tuner share: edges first, then the models' own rows."""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import DTYPE_PAIRS, TORCH_DTYPE, Draw, poisoned
from kerngen.templates.kernel import Case, asking
from kerngen.templates.rmsnorm.op import rmsnorm
from kerngen.templates.rmsnorm.spec import Problem


def case_for(problem: Problem) -> Case:
    p = problem
    weight = "" if p.has_weight else "_no-weight"
    return Case(f"h{p.hidden}_{p.residual_dtype}-{p.dtype}{weight}_t{p.num_tokens}", p, p.hidden + p.num_tokens)


def _cases(hidden: int, *tokens: int, **fields: Any) -> tuple[Case, ...]:
    return tuple(case_for(Problem(hidden, d, r, num_tokens=t, **fields)) for d, r in DTYPE_PAIRS for t in tokens)


CASES = (
    *_cases(8, 1, 3, 33),  # one vector: 31 lanes idle
    *_cases(264, 1, 5),  # 33 vectors: a second warp with one
    *_cases(1544, 2, 7, has_weight=False),  # 193 vectors
    *_cases(256, 1, 42, 84),
    *_cases(5376, 1, 2, 65, 129),
    *_cases(2816, 3, has_weight=False),
    Case("zeros", Problem(5376, num_tokens=3), 1, {"kind": "zeros"}),  # eps alone: zeros, not NaN
    Case("tiny", Problem(5376, num_tokens=3), 2, {"kind": "tiny"}),  # mean(x^2) far below eps
    Case("huge", Problem(5376, residual_dtype="fp32", num_tokens=3), 3, {"kind": "huge"}),
)
_STD = {"normal": 1.0, "zeros": 0.0, "tiny": 1e-5, "huge": 1e5}


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. x: normal, its standard deviation by options["kind"]; weight about 1; out is NaN."""
    p = case.problem
    draw = Draw(case.seed, device)
    std = _STD[case.options.get("kind", "normal")]
    return {
        "out": poisoned(p.num_tokens, p.hidden, dtype=p.dtype, device=device),
        "x": draw.normal(p.num_tokens, p.hidden, dtype=p.residual_dtype, std=std),
        "weight": draw.normal(p.hidden, dtype=p.dtype, mean=1.0, std=0.25) if p.has_weight else None,
        "eps": 1e-6,
        "num_tokens": p.num_tokens,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    return asking(rmsnorm, case, inputs, out_dtype=TORCH_DTYPE[case.problem.dtype])
