"""What key_means is timed on, and torch's gather and mean beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerngen.templates.kernel import Case
from kerngen.templates.key_means.cases import case_for
from kerngen.templates.key_means.spec import Problem

BENCH_CASES: tuple[Case, ...] = (
    case_for(Problem(num_tokens=2048), "chunk2k"),
    case_for(Problem(num_kv_heads=2, num_tokens=2048), "chunk2k-2-heads"),
    case_for(Problem(num_kv_heads=2, num_tokens=131072), "prefix131k"),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: of one sequence's pages in the activations' dtype."""
    p = case.problem
    if p.kv_format != "plain" or p.batch > 1:
        return {}
    pages = inputs["block_table"][0, : int(inputs["kv_lens"][0]) // p.page_size].long()
    parts = (-1, p.mean_keys)
    return {"eager": lambda: inputs["k"][pages].unflatten(2, parts).mean(3)}
