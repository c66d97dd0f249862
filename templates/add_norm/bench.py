"""What add_norm is timed on, and the model's own operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from kerngen.templates.add_norm.cases import case_for
from kerngen.templates.add_norm.spec import Problem
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE, rms_norm
from kerngen.templates.kernel import Case

BENCH_CASES: tuple[Case, ...] = tuple(
    case_for(Problem(has_scalar=scalar, num_tokens=t)) for scalar in (False, True) for t in (1, 4, 32, 4096)
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: the model's own sequence of operations. torch: the same around torch's fused rms_norm."""
    p: Problem = case.problem
    eps, dtype = inputs["eps"], TORCH_DTYPE[p.dtype]

    def run(norm: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        h = norm(inputs["h"], inputs["post_weight"]) if p.has_post else inputs["h"]
        stream = inputs["residual"] + h
        if p.has_scalar:
            stream = stream * inputs["layer_scalar"]
        return norm(stream, inputs["next_weight"]) if p.has_next else stream

    found: dict[str, Callable[[], object]] = {"eager": lambda: run(lambda x, w: rms_norm(x, w, eps).to(dtype))}
    if p.dtype == p.residual_dtype:
        found["torch"] = lambda: run(lambda x, w: torch_rms_norm(x, (p.hidden,), w, eps))
    return found
