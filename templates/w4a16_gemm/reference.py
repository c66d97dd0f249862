"""The product in fp32 from the unpacked weights. Source of int4's format: compressed-tensors, "pack-quantized"."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.common.rows.torch_rows import GATED, UNIT, rounded
from kerngen.templates.common.w4.pack import dequantize, separate, unpack
from kerngen.templates.kernel import Tolerance
from kerngen.templates.w4a16_gemm.spec import Problem


def w4a16_gemm(x: Tensor, weight_packed: Tensor, weight_scale: Tensor) -> Tensor:
    """x [M, K] times dequant(W) [N, K] transposed, in fp32: [M, N]. W as `pack` takes it."""
    return x.float() @ dequantize(weight_packed, weight_scale).T


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    weight_packed, weight_scale = unpack(inputs["w_packed"], inputs["scales"])
    if not problem.gated:
        return {"out": w4a16_gemm(inputs["x"], weight_packed, weight_scale)}
    out = w4a16_gemm(inputs["x"], separate(weight_packed), separate(weight_scale))
    gate, up = rounded(out, problem.dtype).chunk(2, dim=-1)
    return {"out": GATED[problem.activation](gate, up, problem.dtype)}


def tolerance(problem: Problem) -> Tolerance:
    """cases.py scales W so that outputs have a standard deviation near 1."""
    eps = UNIT[problem.dtype]
    if problem.gated:
        return Tolerance(
            atol=14 * eps,
            rtol=7 * eps,
            why="gate and up are each off by 3 eps and 1.5 eps of their size, as below, and multiply the other's size, "
            "of which the largest of 10^6 is 5; their product, and the activation before it, are rounded once more",
        )
    return Tolerance(
        atol=3 * eps,
        rtol=1.5 * eps,
        why="each weight, and the output, is rounded once to 16 bits (relative error up to half an ulp, 0.4 of it "
        "in the mean); a sum of K such errors is a normal variable of 0.4 eps times the output's deviation, 1, and "
        "its largest of 10^6 is 5 deviations: 2 eps. fp32 sums add less than eps / 10",
    )
