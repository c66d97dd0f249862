"""What head norms, RoPE and the cache write mean, once, in torch: the references compute it here.

Source: Gemma4TextAttention.forward, Gemma4TextRotaryEmbedding.forward and apply_rotary_pos_emb in transformers 5.22,
modeling_gemma4.py: angles, sine and cosine in fp32, cast to the activations' dtype; then two products and a sum,
each rounded to that dtype. Keys are normed with a weight, values without, and values are not rotated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.rows.torch_rows import rms_norm, rope, rounded


def new_heads(
    raw: Tensor, num_q_heads: int, num_kv_heads: int, k_eq_v: bool, num_rotated_pairs: int, dtype: str,
    given: Mapping[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k and v of raw [num_tokens, heads * head_dim], q | k | v, q | k with k_eq_v, or q with num_kv_heads 0.

    given: q_weight, k_weight, inv_freq, positions and eps. Returns [num_tokens, heads, head_dim] each, fp32 values of
    `dtype`.
    """
    eps, positions, inv_freq = given["eps"], given["positions"], given["inv_freq"]
    heads = raw.float().view(len(raw), -1, 2 * len(inv_freq))
    q, k, v = heads.split((num_q_heads, num_kv_heads, heads.shape[1] - num_q_heads - num_kv_heads), dim=1)

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        return rope(rounded(rms_norm(x, weight, eps), dtype), positions, inv_freq, num_rotated_pairs, dtype)

    return (
        turned(q, given["q_weight"]),
        turned(k, given["k_weight"]),
        rounded(rms_norm(k if k_eq_v else v, None, eps), dtype),
    )


def written(cache: Tensor, slots: Tensor, new: Tensor) -> Tensor:
    """cache [num_pages, num_kv_heads, page_size, head_dim] in fp32, with new [num_tokens, num_kv_heads, head_dim] in
    rows slots [num_tokens]; a token whose slot is negative is left out. A cache that is fp32 is written itself.
    """
    page_size, cache = cache.shape[2], cache.float()
    kept = slots >= 0
    cache[slots[kept] // page_size, :, slots[kept] % page_size] = new[kept]
    return cache


def in_pages(k: Tensor, v: Tensor, page_heads: int, is_one: bool) -> tuple[Tensor, Tensor]:
    """k and v [num_pages, num_kv_heads, page_size, head_dim] as the first and the last heads of pages of `page_heads`
    heads, whose other heads are NaN: of one tensor, or of one each. As they are where page_heads is 0.
    """
    if not page_heads:
        return k, v
    pages, heads, size, dim = k.shape
    whole = [torch.full((pages, page_heads, size, dim), torch.nan, dtype=k.dtype, device=k.device) for _ in range(2)]
    of_k, of_v = whole[0][:, :heads], whole[0 if is_one else 1][:, page_heads - heads :]
    of_k.copy_(k)
    of_v.copy_(v)
    return of_k, of_v


def slots_of(positions: Tensor, tables: Tensor, page_size: int) -> Tensor:
    """The rows of paged caches that positions [B, n] int64 of B sequences lie in, by each of tables [C, B, max_pages]
    int32: page * page_size + row in the page. Returns [C, B, n] int64. Positions must lie within the tables.
    """
    pages = tables.gather(2, (positions // page_size).expand(len(tables), -1, -1))
    return torch.add(positions % page_size, pages, alpha=page_size)


def inverse_frequencies(head_dim: int, num_rotated_pairs: int, device: torch.device | str) -> torch.Tensor:
    """theta^(-2 j / head_dim) for the pairs that turn, then zeros: [head_dim / 2] fp32."""
    theta = 1e4 if num_rotated_pairs == head_dim // 2 else 1e6
    powers = torch.arange(0, 2 * num_rotated_pairs, 2, dtype=torch.float32, device=device) / head_dim
    return torch.nn.functional.pad(1.0 / theta**powers, (0, head_dim // 2 - num_rotated_pairs))
