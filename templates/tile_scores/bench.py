"""What tile_scores is timed on, and torch's product of as many rows beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerngen.templates.kernel import Case
from kerngen.templates.tile_scores.cases import case_for
from kerngen.templates.tile_scores.spec import Problem

BENCH_CASES: tuple[Case, ...] = (
    case_for(Problem(num_tokens=2048, kv_len=32768), "31b-chunk2k-of-32k"),
    case_for(Problem(num_q_heads=16, num_kv_heads=2, num_tokens=2048, kv_len=32768), "26b-chunk2k-of-32k"),
    case_for(Problem(num_q_heads=16, num_kv_heads=2, num_tokens=2048, kv_len=131072), "26b-chunk2k-of-131k"),
    case_for(Problem(num_q_heads=16, num_kv_heads=2, num_tokens=128, kv_len=131072), "26b-chunk128-of-131k"),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """matmul: scores of one kv head's queries with the means of all pages, times the heads; without exponentials."""
    p = case.problem
    means = inputs["means"].nan_to_num(0.0).transpose(0, 1).flatten(1, 2)  # [nkv, means, d]
    queries = inputs["q"].view(p.num_tokens, p.num_kv_heads, -1, p.head_dim).permute(1, 0, 2, 3).flatten(1, 2)
    return {"matmul": lambda: queries @ means.transpose(1, 2)}
