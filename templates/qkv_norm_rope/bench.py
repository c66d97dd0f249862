"""What qkv_norm_rope is timed on, and the model's own operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE, rms_norm
from kerngen.templates.kernel import Case
from kerngen.templates.qkv_norm_rope.cases import FULL, SLIDING, case_for
from kerngen.templates.qkv_norm_rope.spec import Problem

BENCH_CASES: tuple[Case, ...] = (
    *(case_for(Problem(num_tokens=t, **SLIDING)) for t in (1, 4, 32, 4096)),
    *(case_for(Problem(num_kv_heads=4, k_eq_v=True, num_tokens=t, **FULL)) for t in (1, 4, 32, 4096)),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: the model's own sequence of operations, without the cache write."""
    p: Problem = case.problem
    dtype, eps = TORCH_DTYPE[p.dtype], inputs["eps"]
    heads = inputs["qkv"].view(p.num_tokens, p.num_heads, p.head_dim)
    q, k = heads[:, : p.num_q_heads], heads[:, p.num_q_heads : p.num_q_heads + p.num_kv_heads]
    v = k if p.k_eq_v else heads[:, p.num_q_heads + p.num_kv_heads :]

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    def eager() -> tuple[Tensor, ...]:
        angles = inputs["positions"].float()[:, None] * inputs["inv_freq"]
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        q_new = rotate(rms_norm(q, inputs["q_weight"], eps).to(dtype), cos, sin)
        if p.q_only:
            return (q_new,)
        k_new = rotate(rms_norm(k, inputs["k_weight"], eps).to(dtype), cos, sin)
        return q_new, k_new, rms_norm(v, None, eps).to(dtype)

    return {"eager": eager}
