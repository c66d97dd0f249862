"""What kv_write is timed on, and torch's indexed writes beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerngen.templates.kernel import Case
from kerngen.templates.kv_write.cases import case_for
from kerngen.templates.kv_write.spec import Problem

BENCH_CASES: tuple[Case, ...] = tuple(case_for(Problem(num_tokens=t, page_heads=32)) for t in (1, 32, 4096))


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: two indexed writes. Negative slots write to the last row there, which takes as long."""
    page_size, slots = case.problem.page_size, inputs["slot_mapping"]
    pages, rows = slots // page_size, slots % page_size

    def eager() -> None:
        for name in ("k", "v"):
            inputs[f"{name}_cache"][pages, :, rows] = inputs[name]

    return {"eager": eager}
