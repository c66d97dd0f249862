"""Positions and slots in torch's integers: block_table[p / page_size] * page_size + p % page_size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.decode_inputs.spec import Problem
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """positions [T], kv_lens [B], slots [2, T], in fp64, which holds all of them exactly."""
    lengths, q_len, page_size = inputs["lengths"], inputs["q_len"], problem.page_size
    positions = lengths[:, None] + torch.arange(q_len, device=lengths.device)  # [B, q_len]
    pages = inputs["tables"].gather(2, (positions // page_size).expand(2, -1, -1))  # [2, B, q_len]
    slots = pages.long() * page_size + positions % page_size
    return {
        "positions": positions.flatten().double(),
        "kv_lens": (lengths + q_len).double(),
        "slots": slots.flatten(1).double(),
    }


def tolerance(problem: Problem) -> Tolerance:
    return Tolerance(0.0, 0.0, "integers")
