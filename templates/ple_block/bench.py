"""What ple_block is timed on, and the model's own operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import gelu, linear

from kerngen.templates.common.rows.torch_rows import rms_norm
from kerngen.templates.kernel import Case
from kerngen.templates.ple_block.cases import case_for
from kerngen.templates.ple_block.spec import Problem

BENCH_CASES: tuple[Case, ...] = tuple(
    case_for(Problem(hidden, num_tokens=t)) for hidden in (1536, 2560) for t in (1, 4, 8, 32)
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: the model's own sequence of operations."""
    p: Problem = case.problem
    eps, dtype = inputs["eps"], inputs["h"].dtype
    ple = inputs["ple"][:, : p.width]

    def eager() -> Tensor:
        stream = inputs["residual"] + rms_norm(inputs["h"], inputs["ffn_weight"], eps).to(dtype)
        gated = gelu(linear(stream.to(dtype), inputs["gate"]), approximate="tanh") * ple
        projected = linear(gated, inputs["projection"])
        stream = (stream + rms_norm(projected, inputs["post_weight"], eps).to(dtype)) * inputs["layer_scalar"]
        return rms_norm(stream, inputs["next_weight"], eps).to(dtype)

    return {"eager": eager}
