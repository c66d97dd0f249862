"""Head norms, RoPE and the cache write in torch: common/attention/heads_torch.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, cat

from kerngen.templates.common.attention.heads_torch import new_heads, written_both
from kerngen.templates.common.attention.kv_formats_torch import all_values, code_flip
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE, tolerance_of_flips
from kerngen.templates.kernel import Tolerance
from kerngen.templates.qkv_norm_rope.spec import Problem
from kerngen.templates.values import KV_FORMATS


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """q in fp32, and unless q_only k_cache and v_cache as `written_both` gives them."""
    p = problem
    if p.num_layers:
        return _of_layers(p, inputs)
    shared = KV_FORMATS[p.kv_format].is_shared
    q, k, v = new_heads(inputs["qkv"][:, : p.num_heads * p.head_dim], p.num_q_heads, p.num_kv_heads, p.k_eq_v,
                        p.num_rotated_pairs, p.dtype, inputs, shared=shared, v_norm=p.v_norm)  # fmt: skip
    if p.q_only:
        return {"q": q}
    made = written_both(inputs["k_cache"], inputs["v_cache"], inputs["slot_mapping"], k, v, p.kv_format)
    return {"q": q, "k_cache": made[0], "v_cache": made[1]}


def _of_layers(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Layer by layer, each with its rows, its weight and its part of the caches."""
    p = replace(problem, num_layers=0)
    rows = inputs["qkv"].unflatten(1, (problem.num_layers, -1)).unbind(1)
    parts = [inputs[name].chunk(problem.num_layers) for name in ("k_cache", "v_cache")]
    made = [expected(p, {**inputs, "qkv": row, "k_weight": weight, "k_cache": k, "v_cache": v})
            for row, weight, k, v in zip(rows, inputs["k_weight"], *parts, strict=True)]  # fmt: skip
    return {"q": made[0]["q"], **{name: cat([of[name] for of in made]) for name in ("k_cache", "v_cache")}}


def values(problem: Problem, name: str, tensor: Tensor) -> Tensor:
    """What an output holds, in the caches' format or not."""
    return tensor if name == "q" else all_values(tensor, problem.kv_format, TORCH_DTYPE[problem.dtype])


def tolerance(problem: Problem) -> Tolerance:
    """Flips of the norm, of sine or cosine, of the products and of the sum, absolute because the sum may cancel."""
    return tolerance_of_flips(problem.dtype, 4.0, 1)


def tolerance_of(problem: Problem, name: str) -> Tolerance:
    """Of a cache with codes one may flip with them."""
    plain = tolerance(problem)
    return plain if name == "q" else replace(plain, atol=plain.atol + code_flip(KV_FORMATS[problem.kv_format]))
