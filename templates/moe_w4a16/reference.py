"""Each expert's MLP in fp32 from its unpacked weights, its routes' rows at once.

Source: Gemma4TextExperts.forward in transformers 5.22, modeling_gemma4.py, before the weighted sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.rows.torch_rows import UNIT, gelu_gated, rounded
from kerngen.templates.common.w4.pack import dequantize, separate, unpack
from kerngen.templates.kernel import Tolerance
from kerngen.templates.moe_w4a16.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    x, ids = inputs["x"].float(), inputs["topk_ids"]
    y = torch.zeros(*ids.shape, problem.hidden, dtype=torch.float32, device=x.device)
    for e in ids.unique().tolist():
        packed, scales = unpack(inputs["gate_up"][e], inputs["gate_up_scales"][e])
        gate_up = dequantize(separate(packed), separate(scales))
        down = dequantize(*unpack(inputs["down"][e], inputs["down_scales"][e]))
        token, slot = torch.where(ids == e)
        gate, up = rounded(x[token] @ gate_up.T, problem.dtype).chunk(2, dim=-1)
        y[token, slot] = gelu_gated(gate, up, problem.dtype) @ down.T
    return {"y": y}


def tolerance(problem: Problem) -> Tolerance:
    """cases.py scales gate and up to a standard deviation of 1, and down so that outputs are near 0.6."""
    eps = UNIT[problem.dtype]
    return Tolerance(
        atol=14 * eps,
        rtol=1.5 * eps,
        why="w4a16_gemm's (3 eps for weights and output of a product), once for gate and up, whose errors the second "
        "product carries on at 0.6 of their size, and once for down; gate, up, activation and h are rounded besides: "
        "of 10^7 values one was off by 11 eps on an H200",
    )
