"""Tensors to calls of tile_scores."""

from __future__ import annotations

import torch
from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.attention.tile_lists import num_entries, num_lists
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.tile_scores.spec import Problem
from kerngen.templates.values import AttnBatch

_TAKES = {
    "q": "D[T, NQ, HD]",
    "means": "D[P, NKV, R, HD]",
    "block_table": "int32[B, M]",
    "kv_lens": "int32[B]",
    "cu_seqlens_q": "int32[B + 1]",
}


@op(takes=_TAKES, required=(*_TAKES, "page_size"), optional=("max_kv_len", "sm_scale"))
def tile_scores(q: Tensor, means: Tensor, page_size: int, batch: AttnBatch, sm_scale: float = 1.0) -> Call[Tensor]:
    """What each 128 keys are estimated to weigh for each 128 queries of a sequence and each query head.

    q [T, nq, d], ragged queries as attn_prefill takes them; means [P, nkv, r, d] as key_means makes them of pages of
    page_size = r * 16 or r * 32 tokens; block_table, kv_lens, cu_seqlens_q as in attn_prefill. Returns fp32 base-2
    logarithms [T // 128 + B, nq, tiles of max_kv_len]: lists of sequence s begin at cu_seqlens_q[s] // 128 + s. -1e30
    where no query counts a mean.
    """
    require(batch.cu_seqlens_q is not None, "cu_seqlens_q is None: tile_scores takes ragged queries")
    (tokens, num_q_heads, dim), (_, num_kv_heads, per_page, _) = q.shape, means.shape
    sequences, max_pages = batch.block_table.shape
    kv_len = batch.max_kv_len or max_pages * page_size
    scores = empty(q, num_lists(tokens, sequences), num_q_heads, num_entries(kv_len), dtype=torch.float32)
    problem = None
    if tokens:
        problem = Problem(
            dim, num_q_heads, num_kv_heads, page_size, page_size // max(per_page, 1), DTYPE_NAME[q.dtype], sequences,
            tokens, kv_len,
        )  # fmt: skip
    arguments = {
        "scores": scores, "q": q, "means": means, "cu_seqlens_q": batch.cu_seqlens_q, "kv_lens": batch.kv_lens,
        "block_table": batch.block_table, "sm_scale": sm_scale, "batch": sequences, "max_pages": max_pages,
        "max_tiles": num_entries(kv_len),
    }  # fmt: skip
    return Call("tile_scores", problem, arguments, scores)
