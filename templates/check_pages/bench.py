"""What check_pages is timed on, and torch's operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerngen.templates.check_pages.cases import case_for
from kerngen.templates.check_pages.reference import expected
from kerngen.templates.check_pages.spec import Problem
from kerngen.templates.kernel import Case

BENCH_CASES: tuple[Case, ...] = tuple(case_for(Problem(b), q_len=1) for b in (1, 32, 128))


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: the reference, which is torch's operations."""
    return {"eager": lambda: expected(case.problem, inputs)}
