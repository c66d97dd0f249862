"""What exchange_best is timed on, where one GPU is all ranks, and the same choice in eager torch beside it.

What an exchange between GPUs takes is timed by `python -m tools.bench_exchange`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerngen.templates.exchange_best.cases import case_for
from kerngen.templates.exchange_best.reference import expected
from kerngen.templates.exchange_best.spec import Problem
from kerngen.templates.kernel import Case

BENCH_CASES: tuple[Case, ...] = (
    *(case_for(Problem(ranks, num_tokens=t), kind="normal") for ranks in (2, 4) for t in (1, 8, 32, 128)),
    *(case_for(Problem(2, 131072, source="logits", num_tokens=t), kind="capped") for t in (1, 32)),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """torch: the logit of each rank and their best, without an exchange."""
    return {"torch": lambda: expected(case.problem, inputs)}
