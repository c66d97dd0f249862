"""What qkv_norm_rope_2d is timed on, and torch's own operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from kerngen.templates.kernel import Case
from kerngen.templates.qkv_norm_rope_2d.cases import case_for
from kerngen.templates.qkv_norm_rope_2d.reference import partner
from kerngen.templates.qkv_norm_rope_2d.spec import Problem

# Of one image of 64, 256 and 1,089 soft tokens, and of eight of 256: 31B's heads, and those of E4B.
BENCH_CASES: tuple[Case, ...] = (
    *(case_for(Problem(num_tokens=t)) for t in (576, 2304, 9801)),
    case_for(Problem(num_tokens=8 * 2304), images=8),
    *(case_for(Problem(12, 64, has_bounds=True, num_tokens=t)) for t in (576, 2304, 9801)),
    case_for(Problem(12, 64, has_bounds=True, num_tokens=8 * 2304), images=8),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """torch: clamp, norm and turn, the norm's weight in the turn: of queries and keys in one pass each."""
    p: Problem = case.problem
    norms = torch.stack((inputs["q_weight"], inputs["k_weight"]))[:, None]
    of_partners, cos, sin = partner(norms), inputs["cos"][:, None, None], inputs["sin"][:, None, None]
    limits = None
    if p.has_bounds:
        limits = [b[:, None].expand(3, p.num_heads * p.head_dim).flatten().to(norms.dtype) for b in inputs["bounds"].T]

    def run() -> tuple[Tensor, Tensor]:
        x = inputs["qkv"]
        if limits is not None:
            x = x.clamp(*limits)
        heads = x.view(-1, len(cos), 3, p.num_heads, p.head_dim)
        normed = rms_norm(heads, (p.head_dim,), None, inputs["eps"])
        qk = normed[:, :, :2]
        return torch.addcmul(qk * (norms * cos), partner(qk), of_partners * sin), normed[:, :, 2]

    return {"torch": run}
