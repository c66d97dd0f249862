"""Tensors to calls of dense_gemv."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.dense_gemv.spec import Problem


@op(takes={"x": "D[M, K]", "weight": "D[N, K]"})
def dense_gemv(x: Tensor, weight: Tensor) -> Call[Tensor]:
    """x [M, K] times W^T, weight W [N, K] in x's dtype: [M, N] in it, fp32 sums. M <= 16; N and K multiples of 8.

    With the same configuration a row of the result is the same bits whatever the other rows of x are.
    """
    tokens, k = x.shape
    n = weight.shape[0]
    out = empty(x, tokens, n)
    problem = Problem(n, k, DTYPE_NAME[x.dtype], tokens) if tokens else None
    arguments = {"out": out, "x": x.contiguous(), "w": weight, "num_tokens": tokens}
    return Call("dense_gemv", problem, arguments, out)
