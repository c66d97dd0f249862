"""What decode_chain is timed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerngen.templates.decode_chain.cases import case_for
from kerngen.templates.decode_chain.spec import Problem
from kerngen.templates.kernel import Case

BENCH_CASES: tuple[Case, ...] = (
    case_for(Problem(1536, 2048, 6144, 2560, 256)),
    case_for(Problem(1536, 2048, 12288, 2048, 256)),
    case_for(Problem(2560, 2048, 10240, 3072, 256)),
    case_for(Problem(3840, 4096, 15360, 8192, 0)),
    case_for(Problem(5376, 8192, 21504, 16384, 0)),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """None in torch: what it replaces are launches of w4a16_gemm, add_norm and ple_block, which have benches."""
    return {}
