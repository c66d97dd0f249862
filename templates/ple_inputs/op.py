"""Tensors to calls of ple_inputs."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.ple_inputs.spec import Problem


@op(takes={"ids": "int64[T]", "table": "D[V, W]", "context": "D[T, W]", "norm_weight": "D[P]"})
def ple_inputs(
    ids: Tensor,
    table: Tensor,
    table_scale: float,
    context: Tensor,
    context_scale: float,
    norm_weight: Tensor,
    eps: float,
) -> Call[Tensor]:
    """(norm(context * context_scale; norm_weight) + table[ids] * table_scale) / sqrt(2), each step rounded.

    ids [T] int64; table [vocab, L * P]; context [T, L * P]; the norm runs over each slice of P = len(norm_weight);
    table_scale already rounded to the table's dtype. Returns [T, L, P] in that dtype.
    """
    (tokens,), (vocab, columns), (width,) = ids.shape, table.shape, norm_weight.shape
    whole = width > 0 and columns % width == 0
    require(whole, f"rows of the table have {columns} elements, which are no slices of {width}, as norm_weight has")
    out = empty(context, tokens, columns // width, width)
    problem = Problem(columns // width, width, vocab, DTYPE_NAME[table.dtype], tokens) if tokens else None
    arguments = {
        "out": out, "ids": ids, "table": table, "context": context, "norm_weight": norm_weight,
        "table_scale": table_scale, "context_scale": context_scale, "eps": eps, "num_tokens": tokens,
    }  # fmt: skip
    return Call("ple_inputs", problem, arguments, out)
