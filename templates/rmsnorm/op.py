"""Tensors to calls of rmsnorm."""

from __future__ import annotations

import torch
from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.rmsnorm.spec import Problem


@op(takes={"x": "X[..., H]", "weight": "out_dtype[H]"})
def rmsnorm(x: Tensor, weight: Tensor | None, eps: float, out_dtype: torch.dtype) -> Call[Tensor]:
    """x * (mean(x^2) + eps)^(-1/2) * weight over the last dim, in fp32, rounded to out_dtype once.

    x [..., H] in out_dtype or fp32; weight [H] in out_dtype, None for no product. Returns x's shape in out_dtype.
    """
    hidden = x.shape[-1]
    tokens = x.numel() // hidden if hidden else 0
    out = empty(x, *x.shape, dtype=out_dtype)
    problem = None
    if tokens:
        problem = Problem(hidden, DTYPE_NAME[out_dtype], DTYPE_NAME[x.dtype], weight is not None, tokens)
    arguments = {"out": out, "x": x.contiguous(), "weight": weight, "eps": eps, "num_tokens": tokens}
    return Call("rmsnorm", problem, arguments, out)
