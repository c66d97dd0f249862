"""Shapes that tests, bench and tuner share: edges first, then the models' own layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.call import Op
from kerngen.templates.common.row_torch import Draw, poisoned
from kerngen.templates.common.w4_pack import drawn, pack
from kerngen.templates.decode_chain.op import decode_chain
from kerngen.templates.decode_chain.spec import Problem
from kerngen.templates.kernel import Case


def case_for(problem: Problem, **options: Any) -> Case:
    p = problem
    shape = f"h{p.hidden}_a{p.attended}_i{p.inner}_q{p.qkv}_g{p.group_size}"
    return Case("_".join([shape, f"{p.residual_dtype}-{p.dtype}", *options]), p, p.hidden + p.inner + p.qkv, options)


CASES = (
    # one strip of everything: a single block; a few, of which some have no share of out and qkv
    case_for(Problem(32, 32, 32, 32)),
    case_for(Problem(32, 64, 96, 0)),
    case_for(Problem(64, 256, 1024, 32, 32, "fp16", "fp32")),
    case_for(Problem(384, 512, 1056, 768, 32, "fp16", "fp16")),
    case_for(Problem(512, 640, 1152, 640, 64), in_place=True),
    case_for(Problem(640, 512, 2432, 896, 128)),
    # every SM of a board has a share, and vectors of a row are two a thread
    case_for(Problem(2176, 1024, 4352, 1024, 128, "fp16", "fp32")),
    case_for(Problem(2560, 512, 2752, 0)),
    case_for(Problem(5376, 512, 2112, 160)),
    # sums and products that are exactly zero, which posted words cannot be
    case_for(Problem(2560, 512, 2752, 512), zeros=True),
)
_NORMS = ("post_attention_weight", "pre_ffn_weight", "post_ffn_weight", "next_weight")


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument but the workspace. Rows are normal, weights so that products have a deviation of about 1. Outputs
    are NaN, or residual_out is residual itself with in_place. zeros: attended is zero, and so is each third strip of
    gate and up.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    in_place = case.options.get("in_place", False)
    residual = draw.normal(1, p.hidden, dtype=p.residual_dtype)

    def w4(name: str, n: int, k: int) -> dict[str, Tensor]:
        packed, scales = pack(*drawn(draw, n, k, p.group_size, p.dtype))
        return {f"{name}_packed": packed, f"{name}_scales": scales}

    def norm() -> Tensor:
        return draw.normal(p.hidden, dtype=p.dtype, mean=1.0, std=0.25)

    given: dict[str, Any] = {
        "residual_out": residual if in_place else poisoned(1, p.hidden, dtype=p.residual_dtype, device=device),
        "out": poisoned(1, p.qkv or p.hidden, dtype=p.dtype, device=device),
        "residual": residual,
        "attended": draw.normal(1, p.attended, dtype=p.dtype),
        **w4("out", p.hidden, p.attended),
        **w4("gate_up", 2 * p.inner, p.hidden),
        **w4("down", p.hidden, p.inner),
        **{name: norm() for name in _NORMS},
        **dict.fromkeys(("qkv_packed", "qkv_scales")),
        "layer_scalar": draw.normal(1, dtype=p.dtype, mean=0.7, std=0.1),
        "eps": 1e-6,
    }
    if p.qkv:
        given |= w4("qkv", p.qkv, p.hidden)
    if case.options.get("zeros"):
        given["attended"].zero_()
        given["gate_up_scales"][::3] = 0.0
    return given


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    return decode_chain, {k: v for k, v in inputs.items() if k not in ("residual_out", "out")}
