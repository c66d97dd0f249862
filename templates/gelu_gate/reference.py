"""activation(gate) * up in torch, with the activation rounded to dtype before the product, as the models have it.

Sources: common/rows/torch_rows.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.common.rows.torch_rows import GATED, UNIT
from kerngen.templates.gelu_gate.spec import Problem
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """out [num_tokens, width] in fp32, holding values of dtype."""
    p = problem
    if p.packed:
        gate, up = inputs["gate"].split(p.width, dim=-1)
    else:
        gate, up = inputs["gate"], inputs["up"][:, : p.width]
    gated = GATED[p.activation]
    if not p.has_bounds:
        return {"out": gated(gate, up, p.dtype)}
    of_gate, of_up, of_out = inputs["bounds"].tolist()
    return {"out": gated(gate.float().clamp(*of_gate), up.float().clamp(*of_up), p.dtype).clamp(*of_out)}


def tolerance(problem: Problem) -> Tolerance:
    """Two flipped roundings, and where 1 + tanh cancels the reference's own error: 2^-23 of |gate * up| up to 64."""
    return Tolerance(
        64 * 2.0**-23, 4 * UNIT[problem.dtype], f"two flipped roundings to {problem.dtype}; 1 + tanh cancels"
    )
