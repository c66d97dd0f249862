"""Tensors to calls of attn_prefill."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.attn_prefill.spec import Problem
from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import keys_that_matter
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty


@op(
    takes={
        "q": "D[T, NQ, HD]",
        "k_cache": "D[P, NKV, S, HD]",
        "v_cache": "D[P, NKV, S, HD]",
        "block_table": "int32[B, M]",
        "kv_lens": "int32[B]",
        "cu_seqlens_q": "int32[B + 1]",
    },
)
def attn_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    window: int = 0,
    max_kv_len: int = 0,
    sm_scale: float = 1.0,
    logit_cap: float = 0.0,
) -> Call[Tensor]:
    """Causal attention of ragged queries over a paged cache that already holds their keys.

    q [T, nq, d], sequence s owning rows cu_seqlens_q[s] to cu_seqlens_q[s + 1] ([B + 1] int32), at most max_seqlen_q of
    them; the rest as in attn_decode. Returns [T, nq, d].
    """
    batch, max_pages = block_table.shape
    _, num_kv_heads, page_size, dim = k_cache.shape
    tokens, num_q_heads, _ = q.shape
    out = empty(q, *q.shape)
    problem = None
    if tokens:
        problem = Problem(
            dim, num_q_heads, num_kv_heads, page_size, window, True, DTYPE_NAME[q.dtype], logit_cap > 0, batch, tokens,
            keys_that_matter(max_kv_len or max_pages * page_size, max_seqlen_q, window),
        )  # fmt: skip
    arguments = {
        "out": out, "q": q, "k": k_cache, "v": v_cache, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": None,
        "kv_lens": kv_lens, "block_table": block_table, "sm_scale": sm_scale, "logit_cap": logit_cap, "batch": batch,
        "max_pages": max_pages, "max_seqlen_q": max_seqlen_q,
    }  # fmt: skip
    return Call("attn_prefill", problem, arguments, out)


@op(
    takes={
        "q": "D[T, NQ, HD]",
        "k": "D[K, NKV, HD]",
        "v": "D[K, NKV, HD]",
        "cu_seqlens_q": "int32[B1]",
        "cu_seqlens_k": "int32[B1]",
    },
)
def attn_prefill_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = True,
    window: int = 0,
    sm_scale: float = 1.0,
    logit_cap: float = 0.0,
) -> Call[Tensor]:
    """Attention of ragged queries over dense keys k, v [total_k, nkv, d], sequence s owning rows cu_seqlens_k[s] on.

    Query i of a sequence sits at its keys' number - its queries' number + i. Returns [T, nq, d].
    """
    batch = cu_seqlens_q.shape[0] - 1
    tokens, num_q_heads, dim = q.shape
    out = empty(q, *q.shape)
    problem = None
    if tokens:
        problem = Problem(
            dim, num_q_heads, k.shape[1], 0, window, causal, DTYPE_NAME[q.dtype], logit_cap > 0, batch, tokens,
            max_seqlen_k,
        )  # fmt: skip
    arguments = {
        "out": out, "q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "kv_lens": None, "block_table": None, "sm_scale": sm_scale, "logit_cap": logit_cap, "batch": batch,
        "max_pages": 0, "max_seqlen_q": max_seqlen_q,
    }  # fmt: skip
    return Call("attn_prefill", problem, arguments, out)
