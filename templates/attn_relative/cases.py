"""Shapes that tests, bench and tuner share: edges first, then the models' own heads."""

from __future__ import annotations

import math
from typing import Any

import torch

from kerngen.templates.attn_relative.op import attn_relative
from kerngen.templates.attn_relative.spec import Problem
from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.kernel import Case, asking


def case_for(problem: Problem, **options: Any) -> Case:
    """options: sounds, of which there is one if it is not said; kind: open, of infinite bounds, or sharp, of scores far
    beyond the cap.
    """
    p = problem
    words = (f"n{p.num_heads}", f"d{p.head_dim}", f"w{p.window}", p.dtype, *map(str, options.values()))
    return Case("_".join((*words, f"t{p.num_tokens}")), p, p.num_heads + p.head_dim + p.num_tokens, options)


def _cases(heads: int, dim: int, window: int, *tokens: int, sounds: int = 1) -> tuple[Case, ...]:
    options = {"sounds": sounds} if sounds > 1 else {}
    return tuple(
        case_for(Problem(heads, dim, window, d, sounds * t), **options) for d in ("bf16", "fp16") for t in tokens
    )


CASES = (
    *_cases(1, 8, 3, 1, 2, 3, 4, 70),  # a lane a head, which holds all scores
    *_cases(2, 16, 12, 30),
    *_cases(2, 32, 5, 7, sounds=3),
    *_cases(1, 64, 9, 20),  # a score more than lanes
    *_cases(2, 256, 12, 25),
    *_cases(1, 128, 1, 5),
    *_cases(3, 128, 12, 4, sounds=5),  # sounds shorter than the window
    *_cases(1, 128, 32, 50),
    *_cases(8, 128, 12, 1, 11, 12, 13, 100),
    *_cases(8, 128, 12, 27, sounds=3),
    case_for(Problem(num_tokens=25), kind="open"),
    case_for(Problem(num_tokens=25), kind="sharp"),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. q, k and v normal, scores of about 1, with the kind `sharp` of about 100; out is NaN. What
    relative_keys hold of the distance that no query sees is NaN.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    kind = case.options.get("kind", "")
    bounds = [[-1.5, 1.25], [-1.0, 2.0], [-math.inf, 1.5], [-0.5, 0.375]]
    if kind == "open":
        bounds = [[-math.inf, math.inf]] * 4
    relative = draw.normal(p.num_heads, p.window + 1, p.head_dim, dtype="fp32")
    relative[:, 0] = torch.nan
    scale = draw.normal(p.head_dim, dtype="fp32", mean=1.0, std=0.25) * p.head_dim**-0.5
    return {
        "out": poisoned(p.num_tokens, p.num_heads * p.head_dim, dtype=p.dtype, device=device),
        "qkv": draw.normal(p.num_tokens, 3 * p.num_heads * p.head_dim, dtype=p.dtype),
        "q_scale": scale * (60.0 if kind == "sharp" else 1.0),
        "relative_keys": relative,
        "bounds": torch.tensor(bounds, device=device),
        "k_scale": 1.5,
        "logit_cap": 50.0,
        "num_tokens": p.num_tokens,
        "seq_len": p.num_tokens // case.options.get("sounds", 1),
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    return asking(attn_relative, case, inputs)
