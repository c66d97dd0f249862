"""The models' heads, and the dense product with its arg-max beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.functional import linear

from kerngen.templates.greedy_head.cases import case_for
from kerngen.templates.greedy_head.spec import Problem
from kerngen.templates.kernel import Case

# E2B, E4B, 26B-A4B, 12B, 31B; a drafter
BENCH_CASES = tuple(
    case_for(Problem(262144, hidden, num_tokens=t))
    for hidden in (1536, 2560, 2816, 3840, 5376, 1024)
    for t in (1, 4, 8, 32)
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """dense: cuBLAS through torch on the whole table, and torch.argmax."""
    return {"dense": lambda: linear(inputs["x"], inputs["weight"]).argmax(-1)}
