"""Shapes that tests, bench and tuner share: edges first, then the models' own heads."""

from __future__ import annotations

import math
from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE, Draw
from kerngen.templates.kernel import Case, asking
from kerngen.templates.qkv_norm_rope_2d.op import qkv_norm_rope_2d
from kerngen.templates.qkv_norm_rope_2d.spec import Problem


def case_for(problem: Problem, **options: Any) -> Case:
    """options: images, of which there is one if it is not said; kind of the inputs."""
    p = problem
    words = (f"n{p.num_heads}", f"d{p.head_dim}", p.dtype, *["bounds"] * p.has_bounds, *map(str, options.values()))
    return Case("_".join((*words, f"t{p.num_tokens}")), p, p.num_heads + p.head_dim + p.num_tokens, options)


def _cases(heads: int, dim: int, *tokens: int, images: int = 1, **fields: Any) -> tuple[Case, ...]:
    options = {"images": images} if images > 1 else {}
    return tuple(
        case_for(Problem(heads, dim, d, num_tokens=images * t, **fields), **options)
        for d in ("bf16", "fp16")
        for t in tokens
    )


CASES = (
    *_cases(1, 8, 1, 33),  # a vector a head, whose pairs lie in its words
    *_cases(2, 24, 54, has_bounds=True),
    *_cases(3, 40, 7, images=3),  # groups of five lanes
    *_cases(5, 16, 9),
    *_cases(3, 48, 6, has_bounds=True),
    *_cases(2, 128, 5),
    *_cases(3, 136, 4),  # a head to a warp, of seventeen lanes
    *_cases(2, 256, 3, images=2),
    *_cases(16, 72, 1, 63, 576),
    *_cases(16, 72, 135, images=3),
    *_cases(12, 64, 1, 117, has_bounds=True),
    *_cases(12, 64, 81, images=2, has_bounds=True),
    case_for(Problem(16, 72, num_tokens=9), kind="zeros"),  # of two patches, by eps alone: zeros, not NaN
    case_for(Problem(16, 72, num_tokens=9), kind="tiny"),  # mean(x^2) far below eps
    case_for(Problem(12, 64, has_bounds=True, num_tokens=9), kind="open"),  # bounds that are infinite
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. qkv normal, with the kind `tiny` of 1e-5; weights about 1; any angles; bounds near 1 and one of
    them infinite, or all with the kind `open`.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    kind = case.options.get("kind", "")
    positions = p.num_tokens // case.options.get("images", 1)
    # The two of a pair have one angle.
    angles = draw.normal(positions, 2, 1, p.head_dim // 4, dtype="fp32", std=3.0).expand(-1, -1, 2, -1).flatten(1)
    sign = torch.ones(2, 2, p.head_dim // 4, device=device)
    sign[:, 0] = -1
    bounds = None
    if p.has_bounds:
        bounds = torch.tensor([[-0.75, 1.25], [-1.0, 0.875], [-math.inf, 1.0]], device=device)
        if kind == "open":
            bounds = torch.tensor([[-math.inf, math.inf]], device=device).expand(3, 2).contiguous()
    dtype = TORCH_DTYPE[p.dtype]
    std = 1e-5 if kind == "tiny" else 1.0
    qkv = draw.normal(p.num_tokens, 3 * p.num_heads * p.head_dim, dtype=p.dtype, std=std)
    if kind == "zeros":
        qkv[:2] = 0
    return {
        "qkv": qkv,
        "q_weight": draw.normal(p.head_dim, dtype=p.dtype, mean=1.0, std=0.25),
        "k_weight": draw.normal(p.head_dim, dtype=p.dtype, mean=1.0, std=0.25),
        "cos": angles.cos().to(dtype),
        "sin": (sign.flatten() * angles.sin()).to(dtype),
        "bounds": bounds,
        "eps": 1e-6,
        "num_tokens": p.num_tokens,
        "num_positions": positions,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    return asking(qkv_norm_rope_2d, case, inputs)
