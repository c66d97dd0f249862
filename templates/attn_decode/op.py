"""Tensors to calls of attn_decode."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.attn_decode.spec import Problem
from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import keys_that_matter, require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty

# What the ops share: the cache and where a sequence lies in it; what turns heads of a projection.
_CACHED = {
    "k_cache": "D[P, NKV, S, HD]",
    "v_cache": "D[P, NKV, S, HD]",
    "block_table": "int32[B, M]",
    "kv_lens": "int32[B]",
}
_HEADS = {"q_weight": "D[HD]", "inv_freq": "fp32[HD // 2]", "positions": "int64[B * q_len]"}


@op(takes={"q": "D[B * q_len, NQ, HD]"} | _CACHED)
def attn_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    q_len: int,
    window: int = 0,
    max_kv_len: int = 0,
    sm_scale: float = 1.0,
    logit_cap: float = 0.0,
) -> Call[Tensor]:
    """softmax(q k^T * sm_scale) v for `q_len` new tokens of each sequence, which the cache already holds.

    q [B * q_len, nq, d]; caches [num_pages, nkv, page_size, d]; block_table [B, max_pages] int32; kv_lens [B] int32,
    the new tokens included. Query i of a sequence sits at kv_len - q_len + i and sees keys at or before it, the last
    `window` of them if window > 0. max_kv_len: no kv_len is longer, which decides the splits of KV; 0 for what the
    block table holds. logit_cap: 0 for none. Returns [B * q_len, nq, d]; a query that sees no key gives zeros.
    """
    out = empty(q, *q.shape)
    return _call(out, q, k_cache, v_cache, block_table, kv_lens, q_len, window, max_kv_len, sm_scale, logit_cap)


@op(
    mutates=("k_cache", "v_cache"),
    takes={"qkv": "D[B * q_len, W]"} | _HEADS | {"k_weight": "D[HD]", "slot_mapping": "int64[B * q_len]"} | _CACHED,
)
def attn_decode_qkv(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    num_q_heads: int,
    num_rotated_pairs: int,
    eps: float,
    q_len: int,
    window: int = 0,
    max_kv_len: int = 0,
    sm_scale: float = 1.0,
    logit_cap: float = 0.0,
) -> Call[Tensor]:
    """qkv_norm_rope and then attn_decode, in one: their arguments, and the latter's result.

    slot_mapping[t] must be the row that the block table names for the token's position (kv_len - q_len + i for token i
    of a sequence), or negative. A token at a negative position is not written. What one sequence of the call writes no
    other may read: pages that sequences share hold older tokens only.
    """
    tokens, width = qkv.shape
    _, num_kv_heads, _, dim = k_cache.shape
    k_eq_v = width == (num_q_heads + num_kv_heads) * dim
    heads = f"{num_q_heads} q heads and {num_kv_heads} kv heads of {dim}"
    require(k_eq_v or width == (num_q_heads + 2 * num_kv_heads) * dim, f"qkv has {width} columns, not those of {heads}")
    out = empty(qkv, tokens, num_q_heads, dim)
    return _call(
        out, qkv, k_cache, v_cache, block_table, kv_lens, q_len, window, max_kv_len, sm_scale, logit_cap,
        "qk" if k_eq_v else "qkv", num_rotated_pairs, q_weight, k_weight, inv_freq, positions, slot_mapping, eps,
    )  # fmt: skip


@op(takes={"q_raw": "D[B * q_len, W]"} | _HEADS | _CACHED)
def attn_decode_raw_q(
    q_raw: Tensor,
    q_weight: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    num_rotated_pairs: int,
    eps: float,
    q_len: int,
    window: int = 0,
    max_kv_len: int = 0,
    sm_scale: float = 1.0,
    logit_cap: float = 0.0,
) -> Call[Tensor]:
    """q_norm_rope and then attn_decode, in one, for a layer that owns no cache: their arguments and its result."""
    tokens, width = q_raw.shape
    dim = k_cache.shape[3]
    require(width % dim == 0, f"q_raw has {width} columns, which are no heads of {dim}")
    out = empty(q_raw, tokens, width // dim, dim)
    return _call(
        out, q_raw, k_cache, v_cache, block_table, kv_lens, q_len, window, max_kv_len, sm_scale, logit_cap,
        "raw_q", num_rotated_pairs, q_weight, None, inv_freq, positions, None, eps,
    )  # fmt: skip


def _call(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    q_len: int,
    window: int,
    max_kv_len: int,
    sm_scale: float,
    logit_cap: float,
    source: str = "q",
    num_rotated_pairs: int = 0,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    inv_freq: Tensor | None = None,
    positions: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    eps: float = 0.0,
) -> Call[Tensor]:
    batch, max_pages = block_table.shape
    _, num_kv_heads, page_size, dim = k_cache.shape
    problem = Problem(
        dim, out.shape[1], num_kv_heads, q_len, page_size, window, DTYPE_NAME[q.dtype], logit_cap > 0, batch,
        keys_that_matter(max_kv_len or max_pages * page_size, q_len, window), source, num_rotated_pairs,
    ) if batch else None  # fmt: skip
    arguments = {
        "out": out, "q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "kv_lens": kv_lens,
        "q_weight": q_weight, "k_weight": k_weight, "inv_freq": inv_freq, "positions": positions,
        "slot_mapping": slot_mapping, "sm_scale": sm_scale, "logit_cap": logit_cap, "eps": eps, "batch": batch,
        "max_pages": max_pages,
    }  # fmt: skip
    return Call("attn_decode", problem, arguments, out)
