"""Tensors to calls of residual_norms."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.residual_norms.spec import Problem


@op(
    mutates=("residual",),
    takes={
        "residual": "D[T, H]", "h": "D[T, H]", "post_weight": "D[H]", "next_weight": "D[H]", "last_weight": "D[H]",
        "bounds": "fp32[3, 2]",
    },
)  # fmt: skip
def residual_norms(
    residual: Tensor,
    h: Tensor,
    post_weight: Tensor | None,
    next_weight: Tensor,
    last_weight: Tensor | None,
    bounds: Tensor,
    eps: float,
) -> Call[Tensor]:
    """residual <- residual + norm(h; post_weight), in place; returns norm(residual; next_weight).

    With last_weight: residual <- norm(residual + norm(h; post_weight); next_weight); returns norm(residual;
    last_weight). post_weight: None adds h as it is. residual, h [T, H]; weights [H]. bounds [3, 2], numbers of their
    dtype or infinite: what h, the rows that the norms of the sum take, and the result are clamped to, lowest and
    highest; the residual is not. Returns [T, H].
    """
    tokens, hidden = residual.shape
    out = empty(h, *h.shape)
    problem = None
    if tokens:
        has_post, has_last = post_weight is not None, last_weight is not None
        problem = Problem(hidden, DTYPE_NAME[h.dtype], has_post, has_last, tokens)
    arguments = {
        "residual": residual, "out": out, "h": h, "post_weight": post_weight, "next_weight": next_weight,
        "last_weight": last_weight, "bounds": bounds, "eps": eps, "num_tokens": tokens,
    }  # fmt: skip
    return Call("residual_norms", problem, arguments, out)
