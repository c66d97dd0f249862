"""Tensors to calls of moe_w4a16."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.common.w4.pack import format_of
from kerngen.templates.common.w4.tiling import STRIP
from kerngen.templates.moe_w4a16.spec import Problem


@op(
    takes={
        "x": "D[T, 32 * U]", "topk_ids": "int32[T, R]",
        "gate_up": "int32[E, 2 * V, U, L, 4]", "gate_up_scales": "S[E, 2 * V, G, P]",
        "down": "int32[E, U, V, M, 4]", "down_scales": "S[E, U, F, Q]",
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
    int32: each expert's `pack(*interleave(gate | up))`; down [E, H / 32, I / 32, 32, 4]: each one's `pack`; of int8
    [..., 64, 4]. Scales as those two give, with minima or without, both in x's dtype or both in fp16.
    """
    tokens, hidden = x.shape
    top_k = topk_ids.shape[1]
    num_experts, inner = len(down), down.shape[2] * STRIP
    sizes = []
    for name, columns, scales in (("gate_up", hidden, gate_up_scales), ("down", inner, down_scales)):
        groups = scales.shape[2]
        is_whole = groups > 0 and columns % groups == 0
        require(is_whole, f"{columns} columns of {name} are not a multiple of {groups} groups")
        sizes.append(columns // groups)
    of_up, of_down = format_of(gate_up, gate_up_scales), format_of(down, down_scales)
    dtype, of_scales = DTYPE_NAME[x.dtype], DTYPE_NAME.get(gate_up_scales.dtype)
    is_one = gate_up_scales.dtype == down_scales.dtype and of_scales in (dtype, "fp16")
    require(is_one, f"scales are {gate_up_scales.dtype} and {down_scales.dtype}; both take x's {x.dtype}, or "
                    "torch.float16")  # fmt: skip
    y = empty(x, tokens, top_k, hidden)
    problem = None
    if tokens:
        of_groups = 0 if sizes[1] == sizes[0] else sizes[1]
        problem = Problem(num_experts, top_k, hidden, inner, sizes[0], dtype, tokens, of_up, of_down, of_groups,
                          of_scales != dtype)  # fmt: skip
    arguments = {
        "y": y, "x": x.contiguous(), "gate_up": gate_up, "gate_up_scales": gate_up_scales, "down": down,
        "down_scales": down_scales, "topk_ids": topk_ids, "num_tokens": tokens,
    }  # fmt: skip
    return Call("moe_w4a16", problem, arguments, y)
