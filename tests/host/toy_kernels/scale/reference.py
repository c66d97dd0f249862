"""scale in torch."""

from __future__ import annotations

from typing import Any

from kerngen.templates.scale.spec import Problem
from torch import Tensor


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {"out": inputs["x"] * 2.0}
