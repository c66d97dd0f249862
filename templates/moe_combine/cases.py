"""Shapes that tests, bench and tuner share: edges first, then the model's own rows."""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import DTYPE_PAIRS, Draw, poisoned
from kerngen.templates.kernel import Case, asking
from kerngen.templates.moe_combine import op
from kerngen.templates.moe_combine.spec import Problem


def case_for(problem: Problem, **options: Any) -> Case:
    p = problem
    sum_alone = () if p.has_norms else ("sum",)
    name = "_".join([f"h{p.hidden}_k{p.top_k}_{p.residual_dtype}-{p.dtype}", *sum_alone, *options, f"t{p.num_tokens}"])
    return Case(name, p, p.hidden + p.top_k + p.num_tokens, options)


def _cases(hidden: int, top_k: int, *tokens: int, **options: Any) -> tuple[Case, ...]:
    return tuple(
        case_for(Problem(hidden, top_k, d, r, num_tokens=t), **options) for d, r in DTYPE_PAIRS for t in tokens
    )


def _sums(hidden: int, top_k: int, *tokens: int) -> tuple[Case, ...]:
    return tuple(
        case_for(Problem(hidden, top_k, d, d, has_norms=False, num_tokens=t)) for d in ("bf16", "fp16") for t in tokens
    )


CASES = (
    *_cases(8, 1, 1, 3, 70),  # one vector: 31 lanes idle
    *_cases(264, 3, 1, 5),  # 33 vectors: a second warp with one
    *_cases(256, 2, 84),
    *_cases(1544, 8, 2, 7),  # 193 vectors
    *_cases(2816, 8, 1, 2, 65, 129),
    *_cases(2816, 8, 3, 66, in_place=True),
    *_cases(5376, 4, 2),
    case_for(Problem(3840, 8, "fp16", "fp16", num_tokens=5)),
    *_sums(8, 1, 1, 3, 70),
    *_sums(264, 3, 5),
    *_sums(2816, 8, 1, 2, 65, 129),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. Rows normal, norms about 1, weights as a router gives them; outputs NaN, or residual itself.

    What the sum alone does not read is None.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    shape = p.num_tokens, p.hidden
    residual = draw.normal(*shape, dtype=p.residual_dtype)

    def norm() -> torch.Tensor:
        return draw.normal(p.hidden, dtype=p.dtype, mean=1.0, std=0.25)

    given = {
        "residual_out": residual if case.options.get("in_place") else poisoned(
            *shape, dtype=p.residual_dtype, device=device
        ),
        "out": poisoned(*shape, dtype=p.dtype, device=device),
        "residual": residual,
        "dense": draw.normal(*shape, dtype=p.dtype, std=0.5),
        "routed": draw.normal(p.num_tokens, p.top_k, p.hidden, dtype=p.dtype, std=0.7),
        "topk_weights": torch.softmax(draw.normal(p.num_tokens, p.top_k, dtype="fp32"), dim=-1),
        "dense_norm": norm(),
        "routed_norm": norm(),
        "post_norm": norm(),
        "layer_scalar": draw.normal(1, dtype=p.dtype, mean=0.7, std=0.1),
        "next_norm": norm(),
        "eps": 1e-6,
        "num_tokens": p.num_tokens,
    }  # fmt: skip
    return given if p.has_norms else dict.fromkeys(given) | {n: given[n] for n in _OF_A_SUM}


_OF_A_SUM = ("out", "routed", "topk_weights", "eps", "num_tokens")


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    if not case.problem.has_norms:
        return asking(op.moe_sum, case, inputs)
    return asking(op.moe_combine if case.options.get("in_place", False) else op.moe_combine_functional, case, inputs)
