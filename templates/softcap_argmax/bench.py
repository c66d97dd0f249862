"""What softcap_argmax is timed on, and torch's four operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kerngen.templates.kernel import Case
from kerngen.templates.softcap_argmax.cases import case_for
from kerngen.templates.softcap_argmax.spec import Problem

BENCH_CASES: tuple[Case, ...] = tuple(
    case_for(Problem(write_capped=write, round_steps=rounds, num_tokens=t))
    for write, rounds in ((False, False), (True, False), (False, True))
    for t in (1, 4, 32)
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: the model's own sequence of operations and torch.argmax."""
    p: Problem = case.problem
    logits, cap = inputs["logits"], inputs["cap"]

    def eager() -> torch.Tensor:
        return (torch.tanh(logits / cap) * cap if p.has_cap else logits).float().argmax(-1)

    return {"eager": eager}
