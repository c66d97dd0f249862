"""Tensors to calls of moe_w4a16."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.common.w4.tiling import STRIP
from kerngen.templates.moe_w4a16.spec import Problem


@op(
    takes={
        "x": "D[T, 32 * U]", "topk_ids": "int32[T, R]",
        "gate_up": "int32[E, 2 * V, U, 32, 4]", "gate_up_scales": "D[E, 2 * V, G, 32]",
        "down": "int32[E, U, V, 32, 4]", "down_scales": "D[E, U, F, 32]",
    }
)  # fmt: skip
def moe_w4a16(
    x: Tensor,
    topk_ids: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
) -> Call[Tensor]:
    """down[e] (gelu_tanh(gate) * up), gate | up = gate_up[e] x, for each expert e of each token.

    Returns [T, R, H] in x's dtype. x [T, H]; topk_ids [T, R] int32 in 0..E - 1. gate_up [E, 2 I / 32, H / 32, 32, 4]
    int32: each expert's `pack(*interleave(gate | up))`; down [E, H / 32, I / 32, 32, 4]: each one's `pack`; scales as
    those two give.
    """
    tokens, hidden = x.shape
    top_k = topk_ids.shape[1]
    num_experts, inner = len(down), down.shape[2] * STRIP
    groups = gate_up_scales.shape[2]
    require(groups > 0 and hidden % groups == 0, f"{hidden} columns are not a multiple of {groups} groups")
    group_size = hidden // groups
    require(
        down_scales.shape[2] * group_size == inner,
        f"down has {down_scales.shape[2]} groups a row of {inner}; gate_up's are of {group_size}",
    )
    y = empty(x, tokens, top_k, hidden)
    problem = None
    if tokens:
        problem = Problem(num_experts, top_k, hidden, inner, group_size, DTYPE_NAME[x.dtype], tokens)
    arguments = {
        "y": y, "x": x.contiguous(), "gate_up": gate_up, "gate_up_scales": gate_up_scales, "down": down,
        "down_scales": down_scales, "topk_ids": topk_ids, "num_tokens": tokens,
    }  # fmt: skip
    return Call("moe_w4a16", problem, arguments, y)
