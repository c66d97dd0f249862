"""Means of keys in torch: common/attention/tile_lists_torch.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.common.attention.tile_lists_torch import write_means
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE, tolerance_of_flips
from kerngen.templates.kernel import Tolerance
from kerngen.templates.key_means.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """means in fp32; rows that nobody makes keep what they hold."""
    means = inputs["means"].float().clone()
    write_means(
        means, inputs["k"], inputs["block_table"], inputs["kv_lens"], inputs["starts"], problem.kv_format,
        TORCH_DTYPE[problem.dtype],
    )  # fmt: skip
    return {"means": means}


def tolerance(problem: Problem) -> Tolerance:
    return tolerance_of_flips(problem.dtype, 1.0, 1)
