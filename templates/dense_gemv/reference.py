"""The product in fp32 torch, unrounded."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.common.rows.torch_rows import UNIT
from kerngen.templates.dense_gemv.spec import Problem
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """out [num_tokens, n] in fp32. Source: torch.nn.functional.linear, what the model's dense matrices are."""
    return {"out": inputs["x"].float() @ inputs["w"].float().T}


def tolerance(problem: Problem) -> Tolerance:
    """cases.py scales W so that outputs have a standard deviation near 1."""
    return Tolerance(
        atol=2.0**-11,
        rtol=1.25 * UNIT[problem.dtype],
        why="the output is rounded once; products are exact in fp32, and tensor cores cut each of up to K / 16 sums of "
        "about 1 after 23 bits: 1344 x 2^-23 at K = 21504, and as much for torch's own order",
    )
