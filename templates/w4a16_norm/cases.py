"""Shapes that tests, bench and tuner share: edges of N, K, group and parts first, then the models' own.

Of several ranks one GPU is all, as in exchange_norm's cases: each seems to have the same rows.
"""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import DTYPE_PAIRS, Draw, poisoned
from kerngen.templates.common.w4.pack import drawn, pack
from kerngen.templates.exchange_norm.cases import loopback
from kerngen.templates.kernel import Case, asking
from kerngen.templates.w4a16_norm.op import w4a16_exchange_norm, w4a16_norm
from kerngen.templates.w4a16_norm.spec import Problem


def case_for(problem: Problem, **options: Any) -> Case:
    p = problem
    names = [f"{p.n}x{p.k}_g{p.group_size}_{p.residual_dtype}-{p.dtype}", *options, f"t{p.num_tokens}"]
    names += [f"n{p.ranks}"] * (p.ranks > 1)
    return Case("_".join([*names, *(["scalar"] if p.has_scalar else [])]), p, p.n + p.k + p.num_tokens, options)


def _cases(
    n: int, k: int, group: int, *tokens: int, in_place: bool = False, scalar: bool = False, ranks: int = 1
) -> tuple[Case, ...]:
    options = {"in_place": True} if in_place else {}
    return tuple(
        case_for(Problem(n, k, group, d, r, scalar, t, ranks), **options) for d, r in DTYPE_PAIRS for t in tokens
    )


CASES = (
    *_cases(96, 768, 32, 8, 5, 4, 3, 2, 1),
    *_cases(256, 1536, 64, 2, 4, 7, scalar=True),
    *_cases(320, 2048, 128, 3, 6, in_place=True),
    *_cases(2816, 4096, 32, 4, 8, in_place=True, scalar=True),
    *_cases(5376, 8192, 32, 2, 4, 5, 8),
    *_cases(5376, 21504, 32, 3, 4, 8, in_place=True, scalar=True),
    *_cases(96, 768, 32, 8, 5, 4, 1, ranks=2),
    *_cases(320, 2048, 128, 3, 6, in_place=True, scalar=True, ranks=3),
    *_cases(5376, 4096, 32, 2, 4, 8, ranks=2),
    *_cases(5376, 5376, 32, 4, 5, in_place=True, scalar=True, ranks=4),
    *_cases(2816, 512, 32, 3, 8, ranks=8),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument but the workspace. The product and residual have a standard deviation of about 1, weights are
    about 1; outputs are NaN, or residual itself with in_place.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    w_packed, scales = pack(*drawn(draw, p.n, p.k, p.group_size, p.dtype))
    shape = p.num_tokens, p.n
    residual = draw.normal(*shape, dtype=p.residual_dtype)
    in_place = case.options.get("in_place", False)
    rank, max_rows = case.seed % p.ranks, p.num_tokens + 1
    return {
        "residual_out": residual if in_place else poisoned(*shape, dtype=p.residual_dtype, device=device),
        "out": poisoned(*shape, dtype=p.dtype, device=device),
        "residual": residual,
        "x": draw.normal(p.num_tokens, p.k, dtype=p.dtype),
        "w_packed": w_packed,
        "scales": scales,
        "post_weight": draw.normal(p.n, dtype=p.dtype, mean=1.0, std=0.25),
        "layer_scalar": draw.normal(1, dtype=p.dtype, mean=0.7, std=0.1) if p.has_scalar else None,
        "next_weight": draw.normal(p.n, dtype=p.dtype, mean=1.0, std=0.25),
        "eps": 1e-6,
        "num_tokens": p.num_tokens,
        "addresses": loopback(p.ranks, rank, max_rows, p.n, device) if p.ranks > 1 else None,
        "rank": rank,
        "max_rows": max_rows if p.ranks > 1 else 0,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    if case.problem.ranks == 1:
        return asking(w4a16_norm, case, inputs)
    return asking(w4a16_exchange_norm, case, inputs, two_shot_from=0)
