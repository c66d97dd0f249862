"""What ple_inputs is timed on, and the model's own operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import embedding

from kerngen.templates.common.rows.torch_rows import rms_norm
from kerngen.templates.kernel import Case
from kerngen.templates.ple_inputs.cases import case_for
from kerngen.templates.ple_inputs.spec import Problem

BENCH_CASES: tuple[Case, ...] = tuple(
    case_for(Problem(layers, vocab_size=8192, num_tokens=t)) for layers in (35, 42) for t in (1, 4, 32, 2048)
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: scale, norm, lookup, scale, sum, scale, one after the other."""
    p: Problem = case.problem
    shape = p.num_tokens, p.num_layers, p.width

    def eager() -> Tensor:
        context = (inputs["context"] * inputs["context_scale"]).view(shape)
        normed = rms_norm(context, inputs["norm_weight"], inputs["eps"]).to(context.dtype)
        tokens = embedding(inputs["ids"], inputs["table"]) * inputs["table_scale"]
        return (normed + tokens.view(shape)) * 2.0**-0.5

    return {"eager": eager}
