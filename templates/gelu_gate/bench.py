"""What gelu_gate is timed on, and torch's two operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.functional import gelu

from kerngen.templates.gelu_gate.cases import case_for
from kerngen.templates.gelu_gate.spec import Problem
from kerngen.templates.kernel import Case

BENCH_CASES: tuple[Case, ...] = tuple(case_for(Problem(num_tokens=t)) for t in (1, 4, 32, 4096))


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: gelu, then the product."""
    p: Problem = case.problem
    if p.packed:
        gate, up = inputs["gate"].split(p.width, dim=-1)
    else:
        gate, up = inputs["gate"], inputs["up"][:, : p.width]
    return {"eager": lambda: gelu(gate, approximate="tanh") * up}
