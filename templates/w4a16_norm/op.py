"""Tensors to calls of w4a16_norm."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.values import Peers
from kerngen.templates.w4a16_norm.spec import Problem

_TAKES: dict[str, str] = {
    "residual": "R[T, 32 * S]",
    "x": "D[T, 32 * U]",
    "w_packed": "int32[S, U, 32, 4]",
    "scales": "D[S, G, 32]",
    "post_weight": "D[32 * S]",
    "layer_scalar": "D[1]",
    "next_weight": "D[32 * S]",
}


@op(mutates=("residual",), takes=_TAKES)
def w4a16_norm(
    residual: Tensor,
    x: Tensor,
    w_packed: Tensor,
    scales: Tensor,
    post_weight: Tensor,
    layer_scalar: Tensor | None,
    next_weight: Tensor,
    eps: float,
) -> Call[Tensor]:
    """residual <- (residual + norm(x W^T; post_weight)) * layer_scalar, in place; returns norm(residual; next_weight).

    As add_norm of w4a16_gemm's output, of up to eight tokens. residual [T, N] in x's dtype or fp32; x [T, K]; W [N, K]
    int4 as `pack` gives it: w_packed [N / 32, K / 32, 32, 4] int32, scales [N / 32, K / group_size, 32] in x's dtype;
    weights [N] and layer_scalar [1], or None for 1, in x's dtype. Returns [T, N] in x's dtype.
    """
    return _call(residual, x, w_packed, scales, post_weight, layer_scalar, next_weight, eps, None)


@op(mutates=("residual",), takes={**_TAKES, "addresses": "int64[N]"})
def w4a16_exchange_norm(
    residual: Tensor,
    x: Tensor,
    w_packed: Tensor,
    scales: Tensor,
    post_weight: Tensor,
    layer_scalar: Tensor | None,
    next_weight: Tensor,
    eps: float,
    peers: Peers,
) -> Call[Tensor]:
    """As w4a16_norm, where x W^T, rounded, is this rank's summand: exchange_norm of w4a16_gemm's output, and with it in
    one sequence. What is returned and residual are the same bits on all ranks.

    peers: the memory that exchange_norm exchanges such rows through; whole rows travel, whatever two_shot_from says.
    Raises ProblemError for more rows than a slot of it has. On the CPU, where no memory is shared, this rank's summand
    stands for every rank's.
    """
    return _call(residual, x, w_packed, scales, post_weight, layer_scalar, next_weight, eps, peers)


def _call(
    residual: Tensor,
    x: Tensor,
    w_packed: Tensor,
    scales: Tensor,
    post_weight: Tensor,
    layer_scalar: Tensor | None,
    next_weight: Tensor,
    eps: float,
    peers: Peers | None,
) -> Call[Tensor]:
    (tokens, k), n, groups = x.shape, residual.shape[1], scales.shape[1]
    require(groups > 0 and k % groups == 0, f"K = {k} is not a multiple of {groups} groups")
    out = empty(x, tokens, n)
    problem = None
    if tokens:
        dtypes = DTYPE_NAME[x.dtype], DTYPE_NAME[residual.dtype]
        ranks = 1 if peers is None else peers.addresses.shape[0] - 1
        problem = Problem(n, k, k // groups, *dtypes, layer_scalar is not None, tokens, ranks)
        if peers is not None:
            require(tokens <= peers.max_rows, f"{tokens} tokens; the peers' memory has slots of {peers.max_rows}")
            require(0 <= peers.rank < ranks, f"rank={peers.rank} is not in 0..{ranks - 1}")
    arguments = {
        "residual_out": residual, "out": out, "residual": residual, "x": x.contiguous(), "w_packed": w_packed,
        "scales": scales, "post_weight": post_weight, "layer_scalar": layer_scalar, "next_weight": next_weight,
        "eps": eps, "num_tokens": tokens, "addresses": None if peers is None else peers.addresses,
        "rank": 0 if peers is None else peers.rank, "max_rows": 0 if peers is None else peers.max_rows,
    }  # fmt: skip
    return Call("w4a16_norm", problem, arguments, out)
