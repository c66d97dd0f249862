"""The cache write in torch: common/attention/heads_torch.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.common.attention.heads_torch import written
from kerngen.templates.kernel import Tolerance
from kerngen.templates.kv_write.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """k_cache and v_cache in fp32; rows that no slot names keep what they hold."""
    slots = inputs["slot_mapping"]
    return {f"{name}_cache": written(inputs[f"{name}_cache"], slots, inputs[name].float()) for name in ("k", "v")}


def tolerance(problem: Problem) -> Tolerance:
    return Tolerance(0.0, 0.0, "copies are exact")
