"""Head norms, RoPE and the cache write in torch, rounded where the model rounds.

Source: Gemma4TextAttention.forward, Gemma4TextRotaryEmbedding.forward and apply_rotary_pos_emb in transformers 5.22,
modeling_gemma4.py: angles, sine and cosine in fp32, cast to the activations' dtype; then two products and a sum,
each rounded to that dtype. Keys are normed with a weight, values without, and values are not rotated.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.common.row_torch import rms_norm, rope, rounded, tolerance_of_flips
from kerngen.templates.kernel import Tolerance
from kerngen.templates.qkv_norm_rope.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """q, and unless q_only k_cache and v_cache, in fp32; rows of the caches that no slot names keep what they hold."""
    p = problem
    eps, positions, inv_freq = inputs["eps"], inputs["positions"], inputs["inv_freq"]
    heads = inputs["qkv"].float().view(p.num_tokens, p.num_heads, p.head_dim)
    q, k, v = heads.split((p.num_q_heads, p.num_kv_heads, p.num_heads - p.num_q_heads - p.num_kv_heads), dim=1) if (
        not p.q_only
    ) else (heads, heads[:, :0], heads[:, :0])  # fmt: skip

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        return rope(rounded(rms_norm(x, weight, eps), p.dtype), positions, inv_freq, p.num_rotated_pairs, p.dtype)

    results = {"q": turned(q, inputs["q_weight"])}
    if not p.q_only:
        k_new = turned(k, inputs["k_weight"])
        v_new = rounded(rms_norm(k if p.k_eq_v else v, None, eps), p.dtype)
        slots = inputs["slot_mapping"]
        written = slots >= 0
        pages, rows = slots[written] // p.page_size, slots[written] % p.page_size
        for name, new in (("k_cache", k_new), ("v_cache", v_new)):
            cache = inputs[name].float()
            cache[pages, :, rows] = new[written]
            results[name] = cache
    return results


def tolerance(problem: Problem) -> Tolerance:
    """Flips of the norm, of sine or cosine, of the products and of the sum, absolute because the sum may cancel."""
    return tolerance_of_flips(problem.dtype, 4.0, 1)
