"""Tensors to calls of scale."""

from __future__ import annotations

from kerngen.templates.scale.spec import Problem
from torch import Tensor

from kerngen.templates.call import Call, op


@op(takes={"x": "fp32[T, W]"})
def scale(x: Tensor) -> Call[Tensor]:
    """x * 2. x [T, W] fp32. Returns [T, W]."""
    tokens, width = x.shape
    out = x.new_empty(x.shape)
    return Call("scale", Problem(width, tokens), {"out": out, "x": x, "num_tokens": tokens}, out)
