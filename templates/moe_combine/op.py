"""Tensors to calls of moe_combine."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.moe_combine.spec import Problem

_TAKES = {
    "residual": "R[T, H]",
    "dense": "D[T, H]",
    "routed": "D[T, K, H]",
    "topk_weights": "fp32[T, K]",
    "dense_norm": "D[H]",
    "routed_norm": "D[H]",
    "post_norm": "D[H]",
    "layer_scalar": "D[1]",
    "next_norm": "D[H]",
}


@op(mutates=("residual",), takes=_TAKES)
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
    out = empty(dense, *dense.shape)
    given = residual, dense, routed, topk_weights, dense_norm, routed_norm, post_norm, layer_scalar, next_norm
    return Call("moe_combine", *_asked(residual, out, eps, *given), out)


@op(takes=_TAKES)
def moe_combine_functional(
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
) -> Call[tuple[Tensor, Tensor]]:
    """As moe_combine, and writes no argument: returns the new residual, in residual's dtype, and its norm. For graphs
    that others compile, cut apart and rewrite.
    """
    results = empty(residual, *residual.shape), empty(dense, *dense.shape)
    given = residual, dense, routed, topk_weights, dense_norm, routed_norm, post_norm, layer_scalar, next_norm
    return Call("moe_combine", *_asked(*results, eps, *given), results)


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
    return Call("moe_combine", problem, dict.fromkeys(("residual_out", *_TAKES)) | given, out)


def _asked(residual_out: Tensor, out: Tensor, eps: float, *given: Tensor) -> tuple[Problem | None, dict[str, Any]]:
    """given: what _TAKES names, in its order."""
    named = dict(zip(_TAKES, given, strict=True))
    residual, dense, routed = named["residual"], named["dense"], named["routed"]
    tokens, hidden = residual.shape
    problem = None
    if tokens:
        dtypes = DTYPE_NAME[dense.dtype], DTYPE_NAME[residual.dtype]
        problem = Problem(hidden, routed.shape[1], *dtypes, num_tokens=tokens)
    return problem, {"residual_out": residual_out, "out": out, **named, "eps": eps, "num_tokens": tokens}
