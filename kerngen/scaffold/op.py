"""Tensors to a call of new_kernel."""

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty

from .spec import Problem


@op()
def new_kernel(x: Tensor, weight: Tensor) -> Call[Tensor]:
    """x * weight, row by row. x [T, H]; weight [H] in x's dtype. Returns [T, H]."""
    tokens, hidden = x.shape
    out = empty(x, *x.shape)
    problem = Problem(hidden, DTYPE_NAME[x.dtype], tokens) if tokens else None
    return Call("new_kernel", problem, {"out": out, "x": x.contiguous(), "weight": weight}, out)
