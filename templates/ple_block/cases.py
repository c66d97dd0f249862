"""Shapes that tests, bench and tuner share: edges first, then the models' own rows."""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import DTYPE_PAIRS, Draw, poisoned
from kerngen.templates.kernel import Case, asking
from kerngen.templates.ple_block.op import ple_block
from kerngen.templates.ple_block.spec import Problem


def case_for(problem: Problem, **options: Any) -> Case:
    p = problem
    names = [f"h{p.hidden}_w{p.width}_{p.residual_dtype}-{p.dtype}", *options, f"t{p.num_tokens}"]
    return Case("_".join(names), p, p.hidden + p.num_tokens, options)


def _cases(hidden: int, width: int, *tokens: int, **options: Any) -> tuple[Case, ...]:
    return tuple(case_for(Problem(hidden, width, d, r, t), **options) for d, r in DTYPE_PAIRS for t in tokens)


CASES = (
    *_cases(8, 8, 1, 3, 9),  # one vector a row: 31 lanes idle
    *_cases(32, 16, 1, 5),
    *_cases(264, 40, 1, 2, 7),  # 33 vectors: a second one for one lane; rows that no block divides
    *_cases(1536, 256, 1, 2, 3, 8, 17),
    *_cases(1536, 256, 1, 4, in_place=True),
    *_cases(2560, 256, 1, 5, 8, 64),
    *_cases(4096, 248, 2, 8),
    case_for(Problem(1536, 256, "fp16", "fp16", 3)),
)
_ROWS_BETWEEN = 3  # a row of ple is one slot of this many


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument but the workspace. All normal; weights so that the products are about 1. Of a row of ple the first
    `width` elements count, the rest is NaN. Outputs are NaN, or residual_out is residual itself with in_place.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    shape = p.num_tokens, p.hidden
    residual = draw.normal(*shape, dtype=p.residual_dtype)
    stride = _ROWS_BETWEEN * p.width
    rest = poisoned(p.num_tokens, stride - p.width, dtype=p.dtype, device=device)
    in_place = case.options.get("in_place", False)
    return {
        "residual_out": residual if in_place else poisoned(*shape, dtype=p.residual_dtype, device=device),
        "out": poisoned(*shape, dtype=p.dtype, device=device),
        "residual": residual,
        "h": draw.normal(*shape, dtype=p.dtype, std=0.5),
        "ffn_weight": draw.normal(p.hidden, dtype=p.dtype, mean=1.0, std=0.25),
        "gate": draw.normal(p.width, p.hidden, dtype=p.dtype, std=p.hidden**-0.5),
        "ple": torch.cat((draw.normal(p.num_tokens, p.width, dtype=p.dtype), rest), dim=1),
        "projection": draw.normal(p.hidden, p.width, dtype=p.dtype, std=p.width**-0.5),
        "post_weight": draw.normal(p.hidden, dtype=p.dtype, mean=1.0, std=0.25),
        "layer_scalar": draw.normal(1, dtype=p.dtype, mean=0.7, std=0.1),
        "next_weight": draw.normal(p.hidden, dtype=p.dtype, mean=1.0, std=0.25),
        "eps": 1e-6,
        "num_tokens": p.num_tokens,
        "ple_stride": stride,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    return asking(ple_block, case, inputs, ple=inputs["ple"][:, : case.problem.width])
