"""Tensors to calls of qkv_norm_rope_2d."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME
from kerngen.templates.qkv_norm_rope_2d.spec import Problem


@op(
    mutates=("qkv",),
    takes={
        "qkv": "D[T, W]", "q_weight": "D[HD]", "k_weight": "D[HD]", "cos": "D[P, HD]", "sin": "D[P, HD]",
        "bounds": "fp32[3, 2]",
    },
)  # fmt: skip
def qkv_norm_rope_2d(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, bounds: Tensor | None, eps: float
) -> Call[None]:
    """Head norms and RoPE of an image's patches, in place: q = rope(norm(q; q_weight)), k = rope(norm(k; k_weight)), v
    = norm(v).

    qkv [T, 3 * heads * d] as q | k | v, of whole images of P patches each; weights [d]. cos, sin [P, d]: what
    multiplies an element and the one that it is paired with, (j, j + d / 4) within each half of a head; sin is negative
    for the first of a pair. bounds [3, 2] fp32, numbers of qkv's dtype: what q, k and v are clamped to before, lowest
    and highest; None for nothing.
    """
    (tokens, width), dim, positions = qkv.shape, q_weight.shape[0], cos.shape[0]
    require(width > 0 and width % (3 * dim) == 0, f"qkv has {width} columns, which are no q, k and v of heads of {dim}")
    require(
        positions > 0 and tokens % positions == 0,
        f"qkv has {tokens} rows, which are no images of {positions} patches, as cos and sin have",
    )
    problem = None
    if tokens:
        problem = Problem(width // (3 * dim), dim, DTYPE_NAME[qkv.dtype], bounds is not None, tokens)
    arguments = {
        "qkv": qkv, "q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin, "bounds": bounds, "eps": eps,
        "num_tokens": tokens, "num_positions": positions,
    }  # fmt: skip
    return Call("qkv_norm_rope_2d", problem, arguments, None)
