"""What attn_relative is timed on, and torch's own operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kerngen.templates.attn_relative.cases import case_for
from kerngen.templates.attn_relative.spec import Problem
from kerngen.templates.kernel import Case

# Of a sound of 2, 30 and 120 s.
BENCH_CASES: tuple[Case, ...] = tuple(case_for(Problem(num_tokens=t)) for t in (50, 750, 3000))


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """torch: the keys of each query unfolded, and products of them."""
    p: Problem = case.problem
    cap: float = inputs["logit_cap"]
    *of_parts, of_out = inputs["bounds"].tolist()
    relative = inputs["relative_keys"][:, 1:]
    unseen = torch.arange(p.window) < p.window - 1 - torch.arange(p.num_tokens)[:, None]
    unseen = unseen.to(relative.device)

    def run() -> Tensor:
        parts = inputs["qkv"].float().view(p.num_tokens, 3, p.num_heads, p.head_dim).unbind(1)
        q, k, v = (part.clamp(*bounds) for part, bounds in zip(parts, of_parts, strict=True))
        q = (q * inputs["q_scale"]).transpose(0, 1)[:, :, None]  # [heads, tokens, 1, d]
        k, v = (pad(x, (0, 0, 0, 0, p.window - 1, 0)).unfold(0, p.window, 1).permute(1, 0, 2, 3) for x in (k, v))
        scores = q @ (k * inputs["k_scale"] + relative.transpose(-1, -2)[:, None])
        weights = torch.softmax((torch.tanh(scores / cap) * cap).masked_fill(unseen[:, None], -torch.inf), -1)
        y = (weights @ v.transpose(-1, -2))[:, :, 0].transpose(0, 1).flatten(1)
        return y.to(inputs["qkv"].dtype).clamp(*of_out)

    return {"torch": run}
