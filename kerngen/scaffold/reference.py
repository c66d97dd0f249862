"""out = x * weight in fp32 torch, rounded once."""

from typing import Any

from torch import Tensor

from kerngen.templates.common.rows.torch_rows import rounded
from kerngen.templates.kernel import Tolerance

from .spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {"out": rounded(inputs["x"].float() * inputs["weight"].float(), problem.dtype)}


def tolerance(problem: Problem) -> Tolerance:
    return Tolerance(0.0, 0.0, "fp32 holds the product of two 16-bit numbers exactly, and both round it once")
