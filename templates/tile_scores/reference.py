"""Estimated masses in torch: common/attention/tile_lists_torch.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.common.attention.tile_lists_torch import scores_of_lists
from kerngen.templates.kernel import Tolerance
from kerngen.templates.tile_scores.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """scores [num_lists, num_q_heads, max_tiles]."""
    i = inputs
    scores = scores_of_lists(
        i["q"], i["means"], i["block_table"], i["kv_lens"], i["cu_seqlens_q"], problem.page_size, i["sm_scale"],
        i["max_tiles"],
    )  # fmt: skip
    return {"scores": scores}


def tolerance(problem: Problem) -> Tolerance:
    """Of logarithms: a score is a sum of head_dim exact products, added in another order, and below 64 in the cases."""
    error = problem.head_dim**0.5 * 2.0**-24 * 64 + 2.0**-21
    return Tolerance(16 * error, 0.0, "fp32 sums of head_dim products in another order, and 2^x by ex2.approx")
