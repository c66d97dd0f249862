"""What silu is timed on, and torch's three operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.functional import silu

from kerngen.templates.kernel import Case
from kerngen.templates.silu.cases import case_for
from kerngen.templates.silu.spec import Problem

# Of a sound of 2, 30 and 120 s.
BENCH_CASES: tuple[Case, ...] = tuple(case_for(Problem(num_tokens=t)) for t in (50, 750, 3000))


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """torch: clamp, activation, clamp."""
    before, after = inputs["bounds"].tolist()
    return {"torch": lambda: silu(inputs["x"].clamp(*before)).clamp_(*after)}
