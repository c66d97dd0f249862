"""What decode_inputs is timed on, and torch's operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kerngen.templates.common.attention.heads_torch import slots_of
from kerngen.templates.decode_inputs.cases import case_for
from kerngen.templates.decode_inputs.spec import Problem
from kerngen.templates.kernel import Case

BENCH_CASES: tuple[Case, ...] = (
    *(case_for(Problem(num_tokens=t)) for t in (1, 32)),
    case_for(Problem(num_tokens=128), q_len=4),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: sums, quotient, remainder, gather, and the casts."""
    lengths, tables, q_len, page_size = inputs["lengths"], inputs["tables"], inputs["q_len"], case.problem.page_size
    steps = torch.arange(q_len, device=lengths.device)

    def eager() -> tuple[torch.Tensor, torch.Tensor]:
        return slots_of(lengths[:, None] + steps, tables, page_size), (lengths + q_len).to(torch.int32)

    return {"eager": eager}
