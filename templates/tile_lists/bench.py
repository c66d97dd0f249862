"""What tile_lists is timed on, and torch's comparison with the highest score beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerngen.templates.kernel import Case
from kerngen.templates.tile_lists.cases import case_for
from kerngen.templates.tile_lists.spec import Problem

BENCH_CASES: tuple[Case, ...] = (
    case_for(Problem(32, 4, 1, 2048, 32768), "31b-chunk2k-of-32k"),
    case_for(Problem(16, 2, 1, 2048, 131072), "26b-chunk2k-of-131k"),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: the comparison alone, without lists."""
    scores, least = inputs["scores"].nan_to_num(-1e30), inputs["log2_alpha"]
    return {"eager": lambda: scores >= scores.amax(-1, keepdim=True) + least}
