"""The models' heads in the bits that a run takes and in others, and the dense product with its arg-max beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.functional import linear

from kerngen.templates.greedy_head.cases import case_for
from kerngen.templates.greedy_head.spec import Problem, bits_for
from kerngen.templates.kernel import Case

# E2B, E4B, 26B-A4B, 12B, 31B; a drafter
BENCH_CASES = (
    *(
        case_for(Problem(262144, hidden, num_tokens=t, bits=b))
        for hidden in (1536, 2560, 2816, 3840, 5376)
        for b in (6, 7, 8)
        for t in ((1, 4, 8, 32) if b == bits_for(hidden) else (1, 8))
    ),
    *(case_for(Problem(262144, 1024, num_tokens=t, bits=b)) for b in (4, 6, 8) for t in (1, 8)),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """dense: cuBLAS through torch on the whole table, and torch.argmax."""
    return {"dense": lambda: linear(inputs["x"], inputs["weight"]).argmax(-1)}
