"""Tensors to calls of attn_decode."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.attn_decode.spec import Problem
from kerngen.templates.call import Call, op
from kerngen.templates.common.row_spec import keys_that_matter
from kerngen.templates.common.row_torch import DTYPE_NAME, empty


@op(
    takes={
        "q": "D[B * q_len, NQ, HD]",
        "k_cache": "D[P, NKV, S, HD]",
        "v_cache": "D[P, NKV, S, HD]",
        "block_table": "int32[B, M]",
        "kv_lens": "int32[B]",
    },
)
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
    batch, max_pages = block_table.shape
    _, num_kv_heads, page_size, dim = k_cache.shape
    out = empty(q, *q.shape)
    problem = Problem(
        dim, q.shape[1], num_kv_heads, q_len, page_size, window, DTYPE_NAME[q.dtype], logit_cap > 0, batch,
        keys_that_matter(max_kv_len or max_pages * page_size, q_len, window),
    ) if batch else None  # fmt: skip
    arguments = {
        "out": out, "q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "kv_lens": kv_lens,
        "sm_scale": sm_scale, "logit_cap": logit_cap, "batch": batch, "max_pages": max_pages,
    }  # fmt: skip
    return Call("attn_decode", problem, arguments, out)
