"""Tensors to calls of check_pages."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.check_pages.spec import Problem
from kerngen.templates.common.rows.spec import INT32_MAX, require
from kerngen.templates.values import PageLimits, PagesInUse


@op(
    mutates=("writers", "record"),
    takes={
        "tables": "int32[2, B, M]",
        "kv_lens": "int64[B]",
        "cu_seqlens": "int32[B + 1]",
        "slots": "int64[2, T]",
        "writers": "int32[2, P]",
        "record": "int64[6]",
    },
)
def check_pages(pages: PagesInUse, limits: PageLimits, writers: Tensor, record: Tensor) -> Call[None]:
    """The first violation of `limits` by what a forward is about to use of two pools of pages.

    tables [2, B, M] int32, the block tables of both pools, whose rows may lie apart; kv_lens [B] int64, the new tokens
    included; cu_seqlens [B + 1] int32; slots [2, T] int64: page * page_size + row in the page, by each table. writers
    [2, P] int32, P the pages of the larger pool: which row writes each page, 2^31 - 1 for none; of this call are added.
    record [6] int64: violation (0 for none, which it must be to be written), row, pool, entry, value, bound.
    check_pages/spec.py says what is a violation.
    """
    tables, (_, batch, max_pages) = pages.tables, pages.tables.shape
    require(max_pages < 2 or tables.stride(2) == 1, f"entries of a table's row are {tables.stride(2)} apart, not 1")
    most = writers.shape[1]
    for name, count in (("num_full_pages", limits.num_full_pages), ("num_sliding_pages", limits.num_sliding_pages)):
        require(0 < count <= most, f"{name}={count} is not in 1..{most}, the pages that `writers` has")
    require(limits.page_size > 0, f"page_size={limits.page_size} is not positive")
    require(limits.lookback >= 0 and limits.first_row >= 0, f"lookback={limits.lookback} or first_row is negative")
    longest = min(limits.max_kv_len, max_pages * limits.page_size)
    require(longest <= INT32_MAX, f"a sequence of {longest:,} positions; at most {INT32_MAX:,}")
    arguments = {
        "record": record, "writers": writers, "tables": tables, "kv_lens": pages.kv_lens,
        "cu_seqlens": pages.cu_seqlens, "slots": pages.slots, "table_stride": tables.stride(0),
        "row_stride": tables.stride(1), "max_kv_len": longest,
        "num_full_pages": limits.num_full_pages, "num_sliding_pages": limits.num_sliding_pages,
        "page_size": limits.page_size, "first_row": limits.first_row, "max_num_pages": most,
        "lookback": limits.lookback, "num_tokens": pages.slots.shape[1],
    }  # fmt: skip
    return Call("check_pages", Problem(batch) if batch else None, arguments, None)
