"""Tensors to calls of embed."""

from __future__ import annotations

import torch
from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.common.w4.pack import table_format
from kerngen.templates.embed.spec import Problem


@op(takes={"ids": "int64[T]", "table": "D[V, H]"})
def embed(ids: Tensor, table: Tensor, scale: float, out_dtype: torch.dtype) -> Call[Tensor]:
    """table[ids] * scale. ids [T] int64; table [vocab, H]; scale already rounded to the table's dtype.

    Returns [T, H] in out_dtype: the table's, or fp32 (rounded to the table's first).
    """
    (tokens,), (vocab, hidden) = ids.shape, table.shape
    out = empty(table, tokens, hidden, dtype=out_dtype)
    problem = None
    if tokens:
        problem = Problem(hidden, vocab, DTYPE_NAME[table.dtype], DTYPE_NAME[out_dtype], tokens)
    arguments = {"out": out, "ids": ids, "table": table, "scale": scale, "num_tokens": tokens, "table_scales": None}
    return Call("embed", problem, arguments, out)


@op(takes={"ids": "int64[T]", "packed": "int32[S, U, L, 4]", "table_scales": "fp16[S, G, R]"})
def embed_packed(
    ids: Tensor, packed: Tensor, table_scales: Tensor, scale: float, dtype: torch.dtype, out_dtype: torch.dtype
) -> Call[Tensor]:
    """As embed, of a table in w4a16_gemm's order, int4 or int8: packed [vocab / 32, H / 32, 32 or 64, 4] int32 and
    table_scales [vocab / 32, H / group_size, 32 or 64] fp16, as `pack` gives them. Its values are rounded to dtype.

    Returns [T, H] in out_dtype: dtype, or fp32.
    """
    (tokens,), (vocab, hidden, table, group_size) = ids.shape, table_format(packed, table_scales)
    out = empty(packed, tokens, hidden, dtype=out_dtype)
    problem = None
    if tokens:
        problem = Problem(hidden, vocab, DTYPE_NAME[dtype], DTYPE_NAME[out_dtype], tokens, table, group_size)
    arguments = {"out": out, "ids": ids, "table": packed, "scale": scale, "num_tokens": tokens,
                 "table_scales": table_scales}  # fmt: skip
    return Call("embed", problem, arguments, out)
