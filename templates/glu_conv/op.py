"""Tensors to calls of glu_conv."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.glu_conv.spec import Problem


@op(takes={"x": "D[T, W]", "taps": "D[K, C]", "norm_weight": "D[C]", "bounds": "fp32[3, 2]"})
def glu_conv(x: Tensor, taps: Tensor, norm_weight: Tensor, bounds: Tensor, seq_len: int, eps: float) -> Call[Tensor]:
    """silu(norm(conv(value * sigmoid(gate)))), a causal depthwise convolution over each sound's seq_len tokens.

    x [T, 2 * C] as value | gate; taps [K, C], the last of a token itself; norm_weight [C]. bounds [3, 2], numbers of
    x's dtype or infinite: what x, the norm's input and the result are clamped to, lowest and highest. Returns [T, C].
    """
    (tokens, columns), (num_taps, width) = x.shape, taps.shape
    require(columns == 2 * width, f"x has {columns} columns, and taps {width}, which are not half of them")
    require(seq_len > 0 and tokens % seq_len == 0, f"x has {tokens} rows, which are no sounds of {seq_len} tokens")
    out = empty(x, tokens, width)
    problem = Problem(width, num_taps, DTYPE_NAME[x.dtype], tokens) if tokens else None
    arguments = {
        "out": out, "x": x, "taps": taps, "norm_weight": norm_weight, "bounds": bounds, "eps": eps,
        "num_tokens": tokens, "seq_len": seq_len,
    }  # fmt: skip
    return Call("glu_conv", problem, arguments, out)
