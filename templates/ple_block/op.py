"""Tensors to calls of ple_block."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.ple_block.spec import Problem


@op(
    mutates=("residual",),
    takes={
        "residual": "R[T, H]",
        "h": "D[T, H]",
        "ffn_weight": "D[H]",
        "gate": "D[P, H]",
        "ple": "D[T, P]",
        "projection": "D[H, P]",
        "post_weight": "D[H]",
        "layer_scalar": "D[1]",
        "next_weight": "D[H]",
    },
)
def ple_block(
    residual: Tensor,
    h: Tensor,
    ffn_weight: Tensor,
    gate: Tensor,
    ple: Tensor,
    projection: Tensor,
    post_weight: Tensor,
    layer_scalar: Tensor,
    next_weight: Tensor,
    eps: float,
) -> Call[Tensor]:
    """The end of a layer with per-layer embeddings, from the MLP's output h on, for at most 64 tokens.

    r = residual + norm(h; ffn_weight); p = (gelu_tanh(r gate^T) * ple) projection^T; residual <- (r + norm(p;
    post_weight)) * layer_scalar, in place; returns norm(residual; next_weight). residual [T, H] in h's dtype or fp32; h
    [T, H]; gate [P, H]; ple [T, P], whose rows may lie apart; projection [H, P]; weights [H]; layer_scalar [1]. Returns
    [T, H] in h's dtype. Every step is rounded as the model rounds it.
    """
    (tokens, hidden), width = residual.shape, gate.shape[0]
    require(width < 2 or tokens == 0 or ple.stride(1) == 1, f"elements of ple's rows are {ple.stride(1)} apart, not 1")
    out = empty(h, *h.shape)
    problem = None
    if tokens:
        problem = Problem(hidden, width, DTYPE_NAME[h.dtype], DTYPE_NAME[residual.dtype], tokens)
    arguments = {
        "residual_out": residual, "out": out, "residual": residual, "h": h, "ffn_weight": ffn_weight, "gate": gate,
        "ple": ple, "projection": projection, "post_weight": post_weight, "layer_scalar": layer_scalar,
        "next_weight": next_weight, "eps": eps, "num_tokens": tokens, "ple_stride": ple.stride(0),
    }  # fmt: skip
    return Call("ple_block", problem, arguments, out)
