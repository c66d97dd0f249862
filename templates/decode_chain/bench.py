"""What decode_chain is timed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerngen.templates.decode_chain.cases import case_for
from kerngen.templates.decode_chain.spec import Problem
from kerngen.templates.kernel import Case

BENCH_CASES: tuple[Case, ...] = (
    case_for(Problem(3840, 4096, 15360, 8192)),  # 12B and 31B, from a sliding layer to a sliding one
    case_for(Problem(5376, 8192, 21504, 16384)),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """None in torch: what it replaces are launches of w4a16_gemm and add_norm, which have benches."""
    return {}
