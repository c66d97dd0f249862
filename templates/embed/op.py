"""Tensors to calls of embed."""

from __future__ import annotations

import torch
from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
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
    arguments = {"out": out, "ids": ids, "table": table, "scale": scale, "num_tokens": tokens}
    return Call("embed", problem, arguments, out)
