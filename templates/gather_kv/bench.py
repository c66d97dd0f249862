"""What gather_kv is timed on: what attention reads of a prompt, and of a chunk behind a long one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerngen.templates.gather_kv.cases import case_for
from kerngen.templates.gather_kv.spec import Problem
from kerngen.templates.kernel import Case

_SLIDING: dict[str, Any] = {"head_dim": 256, "num_kv_heads": 16, "heads": 16}  # the 31B's
BENCH_CASES: tuple[Case, ...] = (
    case_for(Problem(**_SLIDING), "sliding-8k"),
    case_for(Problem(), "full-8k"),
    case_for(Problem(kv_format="shared_int8"), "full-8k-shared_int8"),
    case_for(Problem(heads=1, num_keys=131072), "full-131k-one-head"),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """None: torch knows no such pages."""
    return {}
