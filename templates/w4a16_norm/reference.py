"""The product in fp32, rounded as the model's tensor is, and add_norm's steps behind it. Sources: those of
w4a16_gemm's and of add_norm's references."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.common.rows.torch_rows import UNIT, rms_norm, rounded
from kerngen.templates.common.w4.pack import dequantize, unpack
from kerngen.templates.exchange_norm.reference import summed
from kerngen.templates.kernel import Tolerance
from kerngen.templates.w4a16_norm.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """residual_out and out: [num_tokens, n] in fp32, holding values of their dtypes. Where there are ranks, each has
    these x and W: what a launch gives that is its own peers (cases.py).
    """
    p = problem
    y = rounded(inputs["x"].float() @ dequantize(*unpack(inputs["w_packed"], inputs["scales"])).T, p.dtype)
    y = summed([y] * p.ranks, p.dtype)
    h = rounded(rms_norm(y, inputs["post_weight"], inputs["eps"]), p.dtype)
    stream = rounded(inputs["residual"].float() + h, p.residual_dtype)
    if p.has_scalar:
        stream = rounded(stream * inputs["layer_scalar"].float(), p.residual_dtype)
    return {"residual_out": stream, "out": rounded(rms_norm(stream, inputs["next_weight"], inputs["eps"]), p.dtype)}


def tolerance(problem: Problem) -> Tolerance:
    eps = UNIT[problem.dtype]
    return Tolerance(
        atol=12 * eps,
        rtol=4 * eps,
        why="the product is off by 3 eps and 1.5 eps of its size, as w4a16_gemm's, and is multiplied by up to 2 "
        "(a weight of 1 +- 0.25, the norm of values about 1); the sum, the product with the scalar and both norms are "
        "rounded, and the next norm multiplies by up to 2 more",
    )
