"""Attention to a window of tokens in fp32 torch, distance by distance, rounded once.

Source: Gemma4AudioAttention of transformers 5.22, modeling_gemma4.py, which works on chunks of the window's length: the
same keys, and those that no query sees. Relative positions: appendix B of arXiv 1901.02860.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.attn_relative.spec import Problem
from kerngen.templates.common.rows.torch_rows import UNIT, rounded
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """out [num_tokens, num_heads * head_dim] in fp32, holding values of dtype."""
    p, seq_len, cap = problem, inputs["seq_len"], inputs["logit_cap"]
    *of_parts, of_out = inputs["bounds"].tolist()
    parts = inputs["qkv"].float().view(-1, seq_len, 3, p.num_heads, p.head_dim).unbind(2)
    q, k, v = (part.clamp(*bounds) for part, bounds in zip(parts, of_parts, strict=True))
    q, k = q * inputs["q_scale"], k * inputs["k_scale"]
    scores, values = [], []
    for distance in range(min(p.window, seq_len)):
        before = torch.arange(seq_len, device=q.device) - distance
        key = k[:, before.clamp(min=0)] + inputs["relative_keys"][:, p.window - distance]
        score = torch.tanh((q * key).sum(-1) / cap) * cap
        scores.append(score.masked_fill((before < 0)[:, None], -torch.inf))
        values.append(v[:, before.clamp(min=0)].masked_fill((before < 0)[:, None, None], 0.0))
    weights = torch.softmax(torch.stack(scores, -1), -1)
    y = sum(weights[..., i, None] * value for i, value in enumerate(values))
    return {"out": rounded(y, p.dtype).clamp(*of_out).view(p.num_tokens, -1)}


def tolerance(problem: Problem) -> Tolerance:
    """A flipped rounding; and fp32's error of scores up to the cap of 50, which softmax makes one of its weights."""
    return Tolerance(
        64 * 2.0**-19, 2 * UNIT[problem.dtype], f"a flipped rounding to {problem.dtype}; scores up to 50 in fp32"
    )
