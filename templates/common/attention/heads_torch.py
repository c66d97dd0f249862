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

from kerngen.templates.common.attention.kv_formats_torch import write_rows
from kerngen.templates.common.rows.torch_rows import rms_norm, rope, rounded
from kerngen.templates.values import KV_FORMATS


def new_heads(
    raw: Tensor, num_q_heads: int, num_kv_heads: int, k_eq_v: bool, num_rotated_pairs: int, dtype: str,
    given: Mapping[str, Any], *, shared: bool = False, v_norm: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k and v of raw [num_tokens, heads * head_dim], q | k | v, q | k with k_eq_v, or q with num_kv_heads 0.

    given: q_weight, k_weight, inv_freq, positions and eps. shared: the dims of q that are not turned are multiplied by
    k_weight, as the cache's keys are not. v_norm: v is normed, without a weight. Returns [num_tokens, heads, head_dim]
    each, fp32 values of `dtype`.
    """
    eps, positions, inv_freq = given["eps"], given["positions"], given["inv_freq"]
    heads = raw.float().unflatten(1, (-1, 2 * len(inv_freq)))
    q, k, v = heads.split((num_q_heads, num_kv_heads, heads.shape[1] - num_q_heads - num_kv_heads), dim=1)

    q_weight = given["q_weight"]
    if shared:
        q_weight = folded_weight(q_weight, given["k_weight"], num_rotated_pairs)

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        return rope(rounded(rms_norm(x, weight, eps), dtype), positions, inv_freq, num_rotated_pairs, dtype)

    return (
        turned(q, q_weight),
        turned(k, given["k_weight"]),
        rounded(rms_norm(k if k_eq_v else v, None, eps), dtype) if v_norm else v,
    )


def folded_weight(q_weight: Tensor, k_weight: Tensor, num_rotated_pairs: int) -> Tensor:
    """q's weight [head_dim] times k's in fp32, but for the pairs that RoPE turns: of q for a cache that is shared."""
    dims = torch.arange(len(q_weight), device=q_weight.device) % (len(q_weight) // 2)
    return q_weight.float() * torch.where(dims < num_rotated_pairs, 1.0, k_weight.float())


def written(cache: Tensor, slots: Tensor, new: Tensor) -> Tensor:
    """cache [num_pages, num_kv_heads, page_size, head_dim] in fp32, with new [num_tokens, num_kv_heads, head_dim] in
    rows slots [num_tokens]; a token whose slot is negative is left out. A cache that is fp32 is written itself.
    """
    cache = cache.float()
    _write(cache, "plain", slots, new, keys=False)
    return cache


def written_both(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor, kv_format: str) -> list[Tensor]:
    """Both caches with k and v [num_tokens, num_kv_heads, head_dim], likewise; copies in their format where that is not
    plain, and twice the same one where they share a pool.
    """
    if kv_format == "plain":
        return [written(k_cache, slots, k), written(v_cache, slots, v)]
    made = [k_cache.clone()] * 2 if KV_FORMATS[kv_format].is_shared else [k_cache.clone(), v_cache.clone()]
    _write(made[0], kv_format, slots, k, keys=True)
    _write(made[1], kv_format, slots, v, keys=False)
    return made


def _write(cache: Tensor, kv_format: str, slots: Tensor, new: Tensor, *, keys: bool) -> None:
    kept, page_size = slots >= 0, cache.shape[2]
    write_rows(cache, kv_format, slots[kept] // page_size, slots[kept] % page_size, new[kept], keys=keys)


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
