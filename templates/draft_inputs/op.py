"""Tensors to calls of draft_inputs."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.common.w4.pack import table_format
from kerngen.templates.draft_inputs.spec import Problem


@op(takes={"ids": "int64[T]", "hidden": "D[T, H]", "table": "D[V, E]"})
def draft_inputs(ids: Tensor, hidden: Tensor, table: Tensor, scale: float) -> Call[Tensor]:
    """[table[ids] * scale, hidden]. ids [T] int64; hidden [T, H]; table [vocab, E]; scale already rounded to the
    table's dtype.

    Returns [T, E + H] in that dtype.
    """
    (tokens, size), (vocab, embed_size) = hidden.shape, table.shape
    out = empty(table, tokens, embed_size + size)
    problem = Problem(embed_size, size, vocab, DTYPE_NAME[table.dtype], tokens) if tokens else None
    arguments = {"out": out, "ids": ids, "table": table, "hidden": hidden, "scale": scale, "num_tokens": tokens,
                 "table_scales": None}  # fmt: skip
    return Call("draft_inputs", problem, arguments, out)


@op(takes={"ids": "int64[T]", "hidden": "D[T, H]", "packed": "int32[S, U, L, 4]", "table_scales": "fp16[S, G, R]"})
def draft_inputs_packed(
    ids: Tensor, hidden: Tensor, packed: Tensor, table_scales: Tensor, scale: float
) -> Call[Tensor]:
    """As draft_inputs, of a table as of embed_packed, whose values are rounded to hidden's dtype."""
    (tokens, size), (vocab, embed_size, table, group_size) = hidden.shape, table_format(packed, table_scales)
    out = empty(hidden, tokens, embed_size + size)
    problem = None
    if tokens:
        problem = Problem(embed_size, size, vocab, DTYPE_NAME[hidden.dtype], tokens, table, group_size)
    arguments = {"out": out, "ids": ids, "table": packed, "hidden": hidden, "scale": scale, "num_tokens": tokens,
                 "table_scales": table_scales}  # fmt: skip
    return Call("draft_inputs", problem, arguments, out)
