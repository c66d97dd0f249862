"""Tensors to calls of add_norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.add_norm.spec import Problem
from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty

_POST = {"residual": "R[T, H]", "h": "D[T, H]", "post_weight": "D[H]", "layer_scalar": "D[1]"}
_POST_NEXT = _POST | {"next_weight": "D[H]"}
_BOUNDED = {"residual": "R[T, H]", "h": "D[T, H]", "post_weight": "D[H]", "bounds": "fp32[2, 2]"}


@op(mutates=("residual",), takes=_POST_NEXT)
def add_norm(
    residual: Tensor, h: Tensor, post_weight: Tensor, layer_scalar: Tensor | None, next_weight: Tensor, eps: float
) -> Call[Tensor]:
    """residual <- (residual + norm(h; post_weight)) * layer_scalar, in place; returns norm(residual; next_weight).

    residual [T, H] in h's dtype or fp32; h [T, H]; weights [H] and layer_scalar [1], or None for 1, in h's dtype.
    Returns [T, H] in h's dtype.
    """
    out = empty(h, *h.shape)
    return Call("add_norm", *_asked(residual, residual, h, post_weight, layer_scalar, next_weight, eps, out), out)


@op(mutates=("residual",), takes=_POST)
def add_post_norm(
    residual: Tensor, h: Tensor, post_weight: Tensor, layer_scalar: Tensor | None, eps: float
) -> Call[None]:
    """As add_norm, where no norm follows: residual alone is written."""
    return Call("add_norm", *_asked(residual, residual, h, post_weight, layer_scalar, None, eps, None), None)


@op(mutates=("residual",), takes={"residual": "R[T, H]", "h": "D[T, H]", "next_weight": "D[H]"})
def add_rmsnorm(residual: Tensor, h: Tensor, next_weight: Tensor, eps: float) -> Call[Tensor]:
    """residual <- residual + h, in place; returns norm(residual; next_weight). Shapes and dtypes as of add_norm."""
    out = empty(h, *h.shape)
    return Call("add_norm", *_asked(residual, residual, h, None, None, next_weight, eps, out), out)


@op(takes=_POST_NEXT)
def add_norm_functional(
    residual: Tensor, h: Tensor, post_weight: Tensor, layer_scalar: Tensor | None, next_weight: Tensor, eps: float
) -> Call[tuple[Tensor, Tensor]]:
    """As add_norm, and writes no argument: returns the new residual, in residual's dtype, and its norm. For graphs that
    others compile, cut apart and rewrite.
    """
    results = empty(residual, *residual.shape), empty(h, *h.shape)
    asked = _asked(results[0], residual, h, post_weight, layer_scalar, next_weight, eps, results[1])
    return Call("add_norm", *asked, results)


@op(takes=_POST)
def add_post_norm_functional(
    residual: Tensor, h: Tensor, post_weight: Tensor, layer_scalar: Tensor | None, eps: float
) -> Call[Tensor]:
    """As add_norm_functional, where no norm follows: returns the new residual."""
    out = empty(residual, *residual.shape)
    return Call("add_norm", *_asked(out, residual, h, post_weight, layer_scalar, None, eps, None), out)


@op(mutates=("residual",), takes=_BOUNDED | {"next_weight": "D[H]"})
def bounded_add_norm(
    residual: Tensor, h: Tensor, post_weight: Tensor, next_weight: Tensor, bounds: Tensor, eps: float
) -> Call[Tensor]:
    """As add_norm, where h, before its norm, and the result are clamped to the rows of `bounds` [2, 2], lowest and
    highest, numbers of h's dtype: what a bounded linear gives, and what the next one takes.
    """
    out = empty(h, *h.shape)
    asked = _asked(residual, residual, h, post_weight, None, next_weight, eps, out, bounds)
    return Call("add_norm", *asked, out)


@op(mutates=("residual",), takes=_BOUNDED)
def bounded_add_post_norm(residual: Tensor, h: Tensor, post_weight: Tensor, bounds: Tensor, eps: float) -> Call[None]:
    """As bounded_add_norm, where no norm follows: residual alone is written, and of `bounds` the first row is used."""
    return Call("add_norm", *_asked(residual, residual, h, post_weight, None, None, eps, None, bounds), None)


def _asked(
    residual_out: Tensor,
    residual: Tensor,
    h: Tensor,
    post_weight: Tensor | None,
    layer_scalar: Tensor | None,
    next_weight: Tensor | None,
    eps: float,
    out: Tensor | None,
    bounds: Tensor | None = None,
) -> tuple[Problem | None, dict[str, Any]]:
    tokens, hidden = residual.shape
    problem = None
    if tokens:
        problem = Problem(
            hidden, DTYPE_NAME[h.dtype], DTYPE_NAME[residual.dtype], has_post=post_weight is not None,
            has_scalar=layer_scalar is not None, has_next=next_weight is not None, num_tokens=tokens,
            has_bounds=bounds is not None,
        )  # fmt: skip
    arguments = {
        "residual_out": residual_out, "out": out, "residual": residual, "h": h, "post_weight": post_weight,
        "layer_scalar": layer_scalar, "next_weight": next_weight, "bounds": bounds, "eps": eps, "num_tokens": tokens,
    }  # fmt: skip
    return problem, arguments
