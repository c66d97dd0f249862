"""Tensors to calls of key_means."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME
from kerngen.templates.key_means.spec import Problem
from kerngen.templates.values import AttnBatch, KVView

_TAKES = {
    "means": "D[P, NKV, R, HD]",
    "k_cache": "D[P, NKV, S, HD]",
    "v_cache": "D[P, NKV, S, HD]",
    "block_table": "int32[B, M]",
    "kv_lens": "int32[B]",
    "starts": "int32[B]",
}


@op(mutates=("means",), takes=_TAKES, required=(*_TAKES, "num_tokens"))
def key_means(means: Tensor, kv: KVView, batch: AttnBatch, starts: Tensor, num_tokens: int) -> Call[None]:
    """Means of keys of a paged cache, where it lately got them: what tile_scores reads.

    means [P, nkv, r, d], beside the caches [P, nkv, page_size, d]: row i of a page's head becomes the mean of its
    page_size / r keys from i * page_size / r on, which are 16 or 32. Of sequence s from the mean on that holds position
    starts[s] ([B] int32), as far as kv_lens has all of its keys. block_table, kv_lens as in attn_decode. num_tokens:
    positions from starts on, about. Returns nothing.
    """
    kv.require_known()
    require(not kv.page_heads, f"k_cache has pages of {kv.page_heads} heads: key_means reads contiguous caches")
    sequences, max_pages = batch.block_table.shape
    problem = None
    if sequences and num_tokens:
        problem = Problem(
            kv.head_dim, kv.num_kv_heads, kv.page_size, kv.page_size // max(means.shape[2], 1), kv.format.name,
            DTYPE_NAME[means.dtype], sequences, num_tokens,
        )  # fmt: skip
    arguments = {
        "means": means, "k": kv.k_cache, "kv_lens": batch.kv_lens, "block_table": batch.block_table, "starts": starts,
        "max_pages": max_pages,
    }  # fmt: skip
    return Call("key_means", problem, arguments, None)
