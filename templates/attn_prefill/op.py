"""Tensors to calls of attn_prefill."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kerngen.templates.attn_prefill.spec import Problem
from kerngen.templates.call import Call, op
from kerngen.templates.common.attention.tile_lists import num_lists
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.values import AttnBatch, KVView

_PAGED = {
    "q": "D[T, NQ, HD]",
    "k_cache": "D[P, NKV, S, HD]",
    "v_cache": "D[P, NKV, S, HD]",
    "block_table": "int32[B, M]",
    "kv_lens": "int32[B]",
    "cu_seqlens_q": "int32[B + 1]",
}
_MASK = {"ends": "int32[T]", "counts": "int32[L, NKV]", "lists": "int32[L, NKV, N]"}
_OPTIONAL = ("window", "max_kv_len", "sm_scale", "logit_cap", *_MASK)


@op(takes=_PAGED | _MASK, required=(*_PAGED, "max_seqlen_q"), optional=_OPTIONAL)
def attn_prefill(
    q: Tensor, kv: KVView, batch: AttnBatch, sm_scale: float = 1.0, logit_cap: float = 0.0
) -> Call[Tensor]:
    """Causal attention of ragged queries over a paged cache that already holds their keys.

    q [T, nq, d], sequence s owning rows cu_seqlens_q[s] to cu_seqlens_q[s + 1] ([B + 1] int32), at most max_seqlen_q of
    them; the rest as in attn_decode. ends [T] int32: the position of the last key that each query sees (values.Mask);
    None for its own. counts [T // 128 + B, nkv], lists [T // 128 + B, nkv, n] int32: of each 128 queries of a sequence
    the tiles of 128 keys that they see, as tile_lists makes them; None for all. Returns [T, nq, d].
    """
    return _paged_call(q, empty(q, *q.shape), kv, batch, sm_scale, logit_cap)


@op(
    mutates=("out",),
    takes={"out": "D[T, NQ, HD]"} | _PAGED | _MASK,
    required=("out", *_PAGED, "max_seqlen_q"),
    optional=_OPTIONAL,
)
def attn_prefill_into(
    out: Tensor, q: Tensor, kv: KVView, batch: AttnBatch, sm_scale: float = 1.0, logit_cap: float = 0.0
) -> Call[None]:
    """As attn_prefill, with its result in out [T, nq, d], which is contiguous. Returns nothing."""
    return _paged_call(q, out, kv, batch, sm_scale, logit_cap).without_result()


def _paged_call(
    q: Tensor, out: Tensor, kv: KVView, batch: AttnBatch, sm_scale: float, logit_cap: float
) -> Call[Tensor]:
    kv.require_known()
    require(batch.cu_seqlens_q is not None, "cu_seqlens_q is None: attn_prefill takes ragged queries")
    sequences, max_pages = batch.block_table.shape
    page_size = kv.page_size
    (tokens, num_q_heads, _), mask = q.shape, batch.mask
    problem = None
    if tokens:
        problem = Problem(
            kv.head_dim, num_q_heads, kv.num_kv_heads, page_size, mask.window, mask.kind == "causal",
            DTYPE_NAME[q.dtype], logit_cap > 0, sequences, tokens, batch.keys_that_matter(page_size), kv.page_heads,
            mask.ends is not None, kv.format.name, mask.lists is not None,
        )  # fmt: skip
        if mask.counts is not None:
            lists = num_lists(tokens, sequences)
            have = f"{tokens} tokens of {sequences} sequences have {lists}"
            require(len(mask.counts) == lists, f"counts are of {len(mask.counts)} lists; {have}")
    arguments = {
        "out": out, "q": q, "k": kv.k_cache, "v": kv.v_cache, "cu_seqlens_q": batch.cu_seqlens_q, "cu_seqlens_k": None,
        "kv_lens": batch.kv_lens, "block_table": batch.block_table, "ends": mask.ends, "counts": mask.counts,
        "lists": mask.lists, "max_tiles": 0 if mask.lists is None else mask.lists.shape[2], "sm_scale": sm_scale,
        "logit_cap": logit_cap, "batch": sequences, "max_pages": max_pages, "max_seqlen_q": batch.max_seqlen_q,
    }  # fmt: skip
    return Call("attn_prefill", problem, arguments, out)


@dataclass(frozen=True, slots=True)
class DenseKeys:
    """Keys and values of ragged sequences, one after the other: k, v [total_k, nkv, d]; sequence s owns rows
    cu_seqlens_k[s] to cu_seqlens_k[s + 1], max_seqlen_k of them at most.
    """

    k: Tensor
    v: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_k: int


@op(
    takes={
        "q": "D[T, NQ, HD]",
        "k": "D[K, NKV, HD]",
        "v": "D[K, NKV, HD]",
        "cu_seqlens_q": "int32[B1]",
        "cu_seqlens_k": "int32[B1]",
    },
    required=("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    optional=("causal", "window", "sm_scale", "logit_cap"),
)
def attn_prefill_dense(
    q: Tensor,
    keys: DenseKeys,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
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
            dim, num_q_heads, keys.k.shape[1], 0, window, causal, DTYPE_NAME[q.dtype], logit_cap > 0, batch, tokens,
            keys.max_seqlen_k,
        )  # fmt: skip
    arguments = {
        "out": out, "q": q, "k": keys.k, "v": keys.v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": keys.cu_seqlens_k,
        "kv_lens": None, "block_table": None, "ends": None, "counts": None, "lists": None, "max_tiles": 0,
        "sm_scale": sm_scale, "logit_cap": logit_cap,
        "batch": batch, "max_pages": 0, "max_seqlen_q": max_seqlen_q,
    }  # fmt: skip
    return Call("attn_prefill", problem, arguments, out)
