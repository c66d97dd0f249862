"""The models' dense matrices, and cuBLAS on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.functional import linear

from kerngen.templates.dense_gemv.cases import case_for
from kerngen.templates.dense_gemv.spec import Problem
from kerngen.templates.kernel import Case

# (n, k): the 31B's head; the 26B's router; E2B's per-layer gate, projection and inputs; a drafter's projection
_SHAPES = ((262144, 5376), (128, 2816), (256, 1536), (1536, 256), (8960, 1536), (1024, 10752))
BENCH_CASES = tuple(case_for(Problem(n, k, num_tokens=m)) for n, k in _SHAPES for m in (1, 4, 16))


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """cuBLAS through torch."""
    return {"cublas": lambda: linear(inputs["x"], inputs["w"])}
