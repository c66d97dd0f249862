"""Shapes that tests, bench and tuner share: edges first, then the models' own rows."""

from __future__ import annotations

import math
from typing import Any

import torch

from kerngen.templates.add_norm import op
from kerngen.templates.add_norm.spec import Problem
from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import DTYPE_PAIRS, Draw, poisoned
from kerngen.templates.kernel import Case, asking


def case_for(problem: Problem, **options: Any) -> Case:
    p = problem
    parts = (
        ("no-post", not p.has_post),
        ("scalar", p.has_scalar),
        ("last", not p.has_next),
        ("bounds", p.has_bounds),
        *options.items(),
    )
    name = "_".join([f"h{p.hidden}_{p.residual_dtype}-{p.dtype}", *(n for n, on in parts if on), f"t{p.num_tokens}"])
    return Case(name, p, p.hidden + p.num_tokens, options)


def _cases(hidden: int, *tokens: int, in_place: bool = False, **fields: Any) -> tuple[Case, ...]:
    return tuple(
        case_for(Problem(hidden, d, r, num_tokens=t, **fields), in_place=in_place)
        for d, r in DTYPE_PAIRS
        for t in tokens
    )


CASES = (
    *_cases(8, 1, 3, 33),  # one vector: 31 lanes idle
    *_cases(264, 1, 5, has_scalar=True),  # 33 vectors: a second warp with one
    *_cases(1544, 2, 7, has_next=False),  # 193 vectors
    *_cases(256, 1, 42, 84, has_scalar=True),
    *_cases(264, 3, in_place=True),
    *_cases(1544, 3, has_next=False, in_place=True),
    *_cases(5376, 1, 2, 65, 129),
    *_cases(5376, 1, 70, in_place=True, has_scalar=True),
    *_cases(2816, 3, has_post=False, in_place=True),
    *_cases(2816, 3, has_post=False, has_next=False, has_scalar=True),
    case_for(Problem(3840, "fp16", "fp16", num_tokens=5)),
    *_cases(264, 1, 5, has_bounds=True, in_place=True),
    *_cases(768, 1, 33, has_bounds=True, in_place=True),
    *_cases(1544, 3, has_bounds=True, has_next=False, in_place=True),
    case_for(Problem(768, "fp16", "fp16", has_scalar=True, num_tokens=5, has_bounds=True)),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. h and residual normal, weights about 1; outputs NaN, or residual itself with in_place."""
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    shape = p.num_tokens, p.hidden
    residual = draw.normal(*shape, dtype=p.residual_dtype)
    in_place = case.options.get("in_place", False)

    def weight(wanted: bool) -> torch.Tensor | None:
        return draw.normal(p.hidden, dtype=p.dtype, mean=1.0, std=0.25) if wanted else None

    return {
        "residual_out": residual if in_place else poisoned(*shape, dtype=p.residual_dtype, device=device),
        "out": poisoned(*shape, dtype=p.dtype, device=device) if p.has_next else None,
        "residual": residual,
        "h": draw.normal(*shape, dtype=p.dtype, std=0.5),
        "post_weight": weight(p.has_post),
        "layer_scalar": draw.normal(1, dtype=p.dtype, mean=0.7, std=0.1) if p.has_scalar else None,
        "next_weight": weight(p.has_next),
        "bounds": torch.tensor([[-0.25, 0.5], [-math.inf, 0.75]], device=device) if p.has_bounds else None,
        "eps": 1e-6,
        "num_tokens": p.num_tokens,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]] | None:
    """The op that asks for this case, and its arguments; None for a sum without a norm behind it, and for bounds with a
    scalar, which no op has.
    """
    p: Problem = case.problem
    if not p.has_post:
        return asking(op.add_rmsnorm, case, inputs) if p.has_next else None
    if p.has_bounds and p.has_scalar:
        return None
    if p.has_bounds:
        return asking(op.bounded_add_norm if p.has_next else op.bounded_add_post_norm, case, inputs)
    if case.options.get("in_place", False):
        return asking(op.add_norm if case.problem.has_next else op.add_post_norm, case, inputs)
    return asking(op.add_norm_functional if case.problem.has_next else op.add_post_norm_functional, case, inputs)
