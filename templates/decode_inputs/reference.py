"""Positions and slots in torch's integers; a position's slot: common/attention/heads_torch.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.attention.heads_torch import slots_of
from kerngen.templates.decode_inputs.spec import Problem
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """positions [T], kv_lens [B], slots [2, T], in fp64, which holds all of them exactly."""
    lengths, q_len = inputs["lengths"], inputs["q_len"]
    positions = lengths[:, None] + torch.arange(q_len, device=lengths.device)  # [B, q_len]
    return {
        "positions": positions.flatten().double(),
        "kv_lens": (lengths + q_len).double(),
        "slots": slots_of(positions, inputs["tables"], problem.page_size).flatten(1).double(),
    }


def tolerance(problem: Problem) -> Tolerance:
    return Tolerance(0.0, 0.0, "integers")
