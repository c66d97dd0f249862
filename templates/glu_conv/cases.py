"""Shapes that tests, bench and tuner share: edges first, then the models' own rows."""

from __future__ import annotations

import math
from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.glu_conv.op import glu_conv
from kerngen.templates.glu_conv.spec import Problem
from kerngen.templates.kernel import Case, asking


def case_for(problem: Problem, **options: Any) -> Case:
    """options: sounds, of which there is one if it is not said; kind of the bounds: open, all infinite."""
    p = problem
    words = (f"w{p.width}", f"k{p.num_taps}", p.dtype, *map(str, options.values()), f"t{p.num_tokens}")
    return Case("_".join(words), p, p.width + p.num_tokens, options)


def _cases(width: int, *tokens: int, sounds: int = 1, **fields: Any) -> tuple[Case, ...]:
    options = {"sounds": sounds} if sounds > 1 else {}
    return tuple(
        case_for(Problem(width, dtype=d, num_tokens=sounds * t, **fields), **options)
        for d in ("bf16", "fp16")
        for t in tokens
    )


CASES = (
    *_cases(8, 1, 3, 33),  # one vector: 31 lanes idle
    *_cases(264, 5, num_taps=3),  # 33 vectors: a second warp with one
    *_cases(64, 1, sounds=7),  # sounds shorter than the taps
    *_cases(64, 6, sounds=3, num_taps=8),
    *_cases(64, 9, num_taps=1),
    *_cases(1024, 1, 6, 33),
    *_cases(1024, 13, sounds=2),
    case_for(Problem(2560, num_tokens=7)),
    case_for(Problem(256, num_tokens=9), kind="open"),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. x normal, norm_weight about 1, taps of a unit's length; out is NaN."""
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    bounds = [[-1.5, 2.0], [-1.0, 0.75], [-math.inf, 1.5]]
    if case.options.get("kind") == "open":
        bounds = [[-math.inf, math.inf]] * 3
    return {
        "out": poisoned(p.num_tokens, p.width, dtype=p.dtype, device=device),
        "x": draw.normal(p.num_tokens, 2 * p.width, dtype=p.dtype),
        "taps": draw.normal(p.num_taps, p.width, dtype=p.dtype, std=p.num_taps**-0.5),
        "norm_weight": draw.normal(p.width, dtype=p.dtype, mean=1.0, std=0.25),
        "bounds": torch.tensor(bounds, device=device),
        "eps": 1e-6,
        "num_tokens": p.num_tokens,
        "seq_len": p.num_tokens // case.options.get("sounds", 1),
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    return asking(glu_conv, case, inputs)
