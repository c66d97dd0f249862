"""Tensors to calls of silu."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME
from kerngen.templates.silu.spec import Problem


@op(mutates=("x",), takes={"x": "D[T, W]", "bounds": "fp32[2, 2]"})
def bounded_silu(x: Tensor, bounds: Tensor) -> Call[None]:
    """x <- x * sigmoid(x), in place. x [T, W]. bounds [2, 2]: what x and the result are clamped to, lowest and highest,
    numbers of x's dtype or infinite.
    """
    tokens, width = x.shape
    problem = Problem(width, DTYPE_NAME[x.dtype], tokens) if tokens else None
    return Call("silu", problem, {"x": x, "bounds": bounds, "num_tokens": tokens}, None)
