"""Tensors to calls of gather_kv."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kerngen.templates.call import Call
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.gather_kv.spec import Problem
from kerngen.templates.values import AttnBatch, KVView


def keys_seen(batch: AttnBatch, page_size: int) -> int:
    """Of a sequence, that its queries may see, in whole pages: of a window also what lies before it on its page."""
    most = batch.max_kv_len or batch.block_table.shape[1] * page_size
    if batch.mask.window:
        most = min(most, batch.mask.window + batch.max_seqlen_q - 1 + page_size - 1)
    return -(-most // page_size) * page_size


def gather_kv(
    kv: KVView, batch: AttnBatch, dtype: torch.dtype, first_head: int = 0, heads: int = 0
) -> Call[tuple[Tensor, Tensor, Tensor]]:
    """The keys and values that ragged queries see of a paged cache in int8 or shared, as plain pages in `dtype`.

    heads: KV heads from first_head on; 0 for all. kv, batch: as attn_prefill takes them. Returns k, v [B * n, heads,
    page_size, d] and the block table [B, M] int32 that names their pages; rows that no query sees, and entries of
    their pages, hold anything. No operator of torch: those take plain caches, which are read where they lie.
    """
    kv.require_known()
    require(batch.cu_seqlens_q is not None, "cu_seqlens_q is None: gather_kv takes ragged queries")
    heads = heads or kv.num_kv_heads - first_head
    fits = first_head >= 0 and first_head + heads <= kv.num_kv_heads
    require(fits, f"first_head={first_head} heads={heads}: the cache has {kv.num_kv_heads}")
    sequences, max_pages = batch.block_table.shape
    page_size, keys = kv.page_size, keys_seen(batch, kv.page_size)
    problem = None
    if sequences and keys:
        problem = Problem(
            kv.head_dim, kv.num_kv_heads, page_size, kv.format.name, DTYPE_NAME[dtype], sequences, heads, keys
        )
    shape = (sequences * (keys // page_size), heads, page_size, kv.head_dim)
    k_out, v_out = (empty(kv.k_cache, *shape, dtype=dtype) for _ in range(2))
    table_out = empty(batch.block_table, sequences, max_pages)
    arguments = {
        "k_out": k_out, "v_out": v_out, "table_out": table_out, "k": kv.k_cache, "v": kv.v_cache,
        "kv_lens": batch.kv_lens, "cu_seqlens_q": batch.cu_seqlens_q, "block_table": batch.block_table,
        "max_pages": max_pages, "window": batch.mask.window, "first_head": first_head,
    }  # fmt: skip
    return Call("gather_kv", problem, arguments, (k_out, v_out, table_out))


def gathered(made: tuple[Tensor, Tensor, Tensor], batch: AttnBatch) -> tuple[KVView, AttnBatch]:
    """What gather_kv returned as the cache and the batch that attn_prefill takes."""
    k, v, table = made
    return KVView(k, v), replace(batch, block_table=table)
