"""Tensors to calls of w4a16_gemm."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.common.w4.pack import format_of
from kerngen.templates.common.w4.tiling import STRIP
from kerngen.templates.w4a16_gemm.spec import Problem


@op(takes={"x": "D[M, 32 * U]", "w_packed": "int32[S, U, L, 4]", "scales": "E[S, G, R]"})
def w4a16_gemm(x: Tensor, w_packed: Tensor, scales: Tensor, row_invariant: bool = False) -> Call[Tensor]:
    """x [M, K] times W^T, W [N, K] int4 or int8 in the order that `pack` gives: [M, N] in x's dtype, fp32 sums.

    w_packed [N / 32, K / 32, 32, 4] int32, or of int8 [N / 32, K / 32, 64, 4]; scales [N / 32, K / group_size, 32], or
    with minima [N / 32, K / group_size, 64], in x's dtype or in fp16. row_invariant: a row's result has the same bits
    in whichever of the M rows it stands, in the same number of rows.
    """
    return _call(x, w_packed, scales, False, row_invariant)


@op(takes={"x": "D[M, 32 * U]", "w_packed": "int32[S, U, L, 4]", "scales": "E[S, G, R]"})
def w4a16_gated(
    x: Tensor, w_packed: Tensor, scales: Tensor, row_invariant: bool = False, activation: str = "gelu_tanh"
) -> Call[Tensor]:
    """activation(gate) * up [M, N / 2], gate | up = x [M, K] times W^T, W as w4a16_gemm's of gate and up interleaved.

    w_packed, scales: `pack(*interleave(gate | up))`. Each factor is rounded to x's dtype, as the model's tensors are.
    row_invariant: see w4a16_gemm. activation: "gelu_tanh" or "silu" (SwiGLU, arXiv 2002.05202).
    """
    return _call(x, w_packed, scales, True, row_invariant, activation)


def _call(
    x: Tensor, w_packed: Tensor, scales: Tensor, gated: bool, row_invariant: bool, activation: str = "gelu_tanh"
) -> Call[Tensor]:
    tokens, k = x.shape
    n = w_packed.shape[0] * STRIP
    groups = scales.shape[1]
    require(groups > 0 and k % groups == 0, f"K = {k} is not a multiple of {groups} groups")
    weights = format_of(w_packed, scales)
    dtype, of_scales = DTYPE_NAME[x.dtype], DTYPE_NAME.get(scales.dtype)
    require(of_scales in (dtype, "fp16"), f"scales is {scales.dtype}; it takes x's {x.dtype}, or torch.float16")
    out = empty(x, tokens, n // 2 if gated else n)
    problem = None
    if tokens:
        problem = Problem(
            n, k, k // groups, dtype, tokens, gated, row_invariant, weights, of_scales != dtype, activation
        )
    arguments = {"out": out, "x": x.contiguous(), "w_packed": w_packed, "scales": scales, "num_tokens": tokens}
    return Call("w4a16_gemm", problem, arguments, out)
