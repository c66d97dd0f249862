"""Tensors to calls of decode_inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import empty
from kerngen.templates.decode_inputs.spec import Problem


@op(takes={"lengths": "int64[B]", "tables": "int32[2, B, M]"})
def decode_inputs(lengths: Tensor, tables: Tensor, q_len: int, page_size: int) -> Call[tuple[Tensor, Tensor, Tensor]]:
    """Where q_len new tokens of each sequence stand, which follow `lengths` tokens that the cache holds.

    lengths [B] int64; tables [2, B, M] int32, the two block tables, whose rows may lie apart; page_size in tokens. The
    caller keeps positions below M * page_size. Returns positions [B * q_len] int64, kv_lens [B] int32 (the new tokens
    included) and slots [2, B * q_len] int64: page * page_size + row in the page, by each table.
    """
    batch, max_pages = tables.shape[1:]
    require(q_len > 0, f"q_len={q_len} is not positive")
    require(max_pages < 2 or tables.stride(2) == 1, f"entries of a table's row are {tables.stride(2)} apart, not 1")
    tokens = batch * q_len
    positions = empty(lengths, tokens)
    kv_lens = empty(lengths, batch, dtype=torch.int32)
    slots = empty(lengths, 2, tokens)
    arguments = {
        "positions": positions, "kv_lens": kv_lens, "slots": slots, "lengths": lengths, "tables": tables,
        "table_stride": tables.stride(0), "row_stride": tables.stride(1), "q_len": q_len, "num_tokens": tokens,
    }  # fmt: skip
    return Call("decode_inputs", Problem(page_size, tokens) if tokens else None, arguments, (positions, kv_lens, slots))
