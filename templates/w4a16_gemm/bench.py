"""Gemma-4 31B's four products; what a dense 16-bit product of the shape takes, and peers where they are at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kerngen.templates.common.w4.pack import dequantize, unpack
from kerngen.templates.kernel import Case
from kerngen.templates.w4a16_gemm.cases import case_for
from kerngen.templates.w4a16_gemm.peers import peers
from kerngen.templates.w4a16_gemm.spec import Problem

# (n, k): gate and up, down, q k v of a sliding layer, o of a sliding layer
_SHAPES = ((43008, 5376), (5376, 21504), (16384, 5376), (5376, 8192))
BENCH_CASES = (
    *(case_for(Problem(n, k, 32, "bf16", m)) for m in (1, 4, 8, 16, 32, 64, 4096) for n, k in _SHAPES),
    *(case_for(Problem(*_SHAPES[0], group, "bf16", m, weights=weights))
      for weights, group in (("int8", 32), ("int8", 16), ("int4_min", 32), ("int8_min", 32)) for m in (1, 8, 64, 2048)),
)  # fmt: skip


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """cuBLAS on the dequantized weights, of which int4 is a quarter; of int4 also peers.py's, on the same weights."""
    packed, scales = unpack(inputs["w_packed"], inputs["scales"])
    x, weight = inputs["x"], dequantize(packed, scales, inputs["x"].dtype)
    found: dict[str, Callable[[], object]] = {"cublas dense": lambda: torch.nn.functional.linear(x, weight)}
    if not case.problem.has_limbs:
        return found
    return found | peers(x, packed, scales, torch.nn.functional.linear(x, weight))
