"""Tensors to calls of moe_combine."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.moe_combine.spec import Problem

_ENDS_A_LAYER = (
    "residual_out",
    "residual",
    "dense",
    "dense_norm",
    "routed_norm",
    "post_norm",
    "layer_scalar",
    "next_norm",
)


@op(
    mutates=("residual",),
    takes={
        "residual": "R[T, H]",
        "dense": "D[T, H]",
        "routed": "D[T, K, H]",
        "topk_weights": "fp32[T, K]",
        "dense_norm": "D[H]",
        "routed_norm": "D[H]",
        "post_norm": "D[H]",
        "layer_scalar": "D[1]",
        "next_norm": "D[H]",
    },
)
def moe_combine(
    residual: Tensor,
    dense: Tensor,
    routed: Tensor,
    topk_weights: Tensor,
    dense_norm: Tensor,
    routed_norm: Tensor,
    post_norm: Tensor,
    layer_scalar: Tensor,
    next_norm: Tensor,
    eps: float,
) -> Call[Tensor]:
    """The end of a layer with experts: residual is updated in place; returns norm(residual; next_norm).

    h = norm(dense; dense_norm) + norm(sum_k topk_weights_k routed_k; routed_norm), then residual <- (residual + norm(h;
    post_norm)) * layer_scalar. residual [T, H] in dense's dtype or fp32; dense [T, H]; routed [T, K, H]; topk_weights
    [T, K] fp32; norms [H]; layer_scalar [1]. Returns [T, H] in dense's dtype.
    """
    tokens, hidden = residual.shape
    out = empty(dense, tokens, hidden)
    problem = None
    if tokens:
        dtypes = DTYPE_NAME[dense.dtype], DTYPE_NAME[residual.dtype]
        problem = Problem(hidden, routed.shape[1], *dtypes, num_tokens=tokens)
    arguments = {
        "residual_out": residual, "out": out, "residual": residual, "dense": dense, "routed": routed,
        "topk_weights": topk_weights, "dense_norm": dense_norm, "routed_norm": routed_norm, "post_norm": post_norm,
        "layer_scalar": layer_scalar, "next_norm": next_norm, "eps": eps, "num_tokens": tokens,
    }  # fmt: skip
    return Call("moe_combine", problem, arguments, out)


@op(takes={"routed": "D[T, K, H]", "topk_weights": "fp32[T, K]"})
def moe_sum(routed: Tensor, topk_weights: Tensor) -> Call[Tensor]:
    """sum_k topk_weights_k routed_k, in fp32, in order, rounded once: what moe_combine norms.

    routed [T, K, H]; topk_weights [T, K] fp32. Returns [T, H] in routed's dtype.
    """
    tokens, top_k, hidden = routed.shape
    out = empty(routed, tokens, hidden)
    problem = None
    if tokens:
        dtype = DTYPE_NAME[routed.dtype]
        problem = Problem(hidden, top_k, dtype, dtype, has_norms=False, num_tokens=tokens)
    given = {"out": out, "routed": routed, "topk_weights": topk_weights, "eps": 0.0, "num_tokens": tokens}
    return Call("moe_combine", problem, dict.fromkeys(_ENDS_A_LAYER) | given, out)
