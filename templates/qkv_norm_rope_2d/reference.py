"""Head norms and RoPE along both sides of an image in fp32 torch, rounded once.

Source: Gemma4VisionAttention.forward in transformers 5.22, modeling_gemma4.py, which rounds the norm and each product
too; cos and sin are rounded as there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.rows.torch_rows import UNIT, rms_norm, rounded
from kerngen.templates.kernel import Tolerance
from kerngen.templates.qkv_norm_rope_2d.spec import Problem


def partner(x: Tensor) -> Tensor:
    """x [..., d] with the two elements of each pair exchanged."""
    return x.unflatten(-1, (2, 2, -1)).flip(-2).flatten(-3)


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """qkv in the shape that it has, in fp32, holding values of dtype."""
    p, qkv = problem, inputs["qkv"].float()
    parts = list(qkv.view(p.num_tokens, 3, p.num_heads, p.head_dim).unbind(1))
    if p.has_bounds:
        parts = [x.clamp(low, high) for x, (low, high) in zip(parts, inputs["bounds"].tolist(), strict=True)]
    row = torch.arange(p.num_tokens, device=qkv.device) % inputs["num_positions"]
    cos, sin = (inputs[name].float()[row][:, None] for name in ("cos", "sin"))
    for i, weight in enumerate((inputs["q_weight"], inputs["k_weight"])):
        x = rms_norm(parts[i], weight, inputs["eps"])
        parts[i] = x * cos + partner(x) * sin
    parts[2] = rms_norm(parts[2], None, inputs["eps"])
    return {"qkv": rounded(torch.stack(parts, 1), p.dtype).view(qkv.shape)}


def tolerance(problem: Problem) -> Tolerance:
    """A flipped rounding; and where a turn cancels, fp32's error of two terms up to twice the root of head_dim."""
    return Tolerance(
        64 * 2.0**-23, 2 * UNIT[problem.dtype], f"a flipped rounding to {problem.dtype}; the sum of a turn cancels"
    )
