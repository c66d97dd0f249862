"""Head norms, RoPE and the cache write in torch: common/attention/heads_torch.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.common.attention.heads_torch import new_heads, written
from kerngen.templates.common.rows.torch_rows import tolerance_of_flips
from kerngen.templates.kernel import Tolerance
from kerngen.templates.qkv_norm_rope.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """q, and unless q_only k_cache and v_cache, in fp32; rows of the caches that no slot names keep what they hold."""
    p = problem
    q, k, v = new_heads(inputs["qkv"], p.num_q_heads, p.num_kv_heads, p.k_eq_v, p.num_rotated_pairs, p.dtype, inputs)
    if p.q_only:
        return {"q": q}
    slots = inputs["slot_mapping"]
    return {"q": q, "k_cache": written(inputs["k_cache"], slots, k), "v_cache": written(inputs["v_cache"], slots, v)}


def tolerance(problem: Problem) -> Tolerance:
    """Flips of the norm, of sine or cosine, of the products and of the sum, absolute because the sum may cancel."""
    return tolerance_of_flips(problem.dtype, 4.0, 1)
