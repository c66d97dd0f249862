"""Tensors to calls of exchange_norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.exchange_norm.spec import Problem
from kerngen.templates.moe_combine.spec import MAX_TOP_K
from kerngen.templates.values import Peers, Routed

_TAKES = {"residual": "R[T, H]", "h": "D[T, H]", "post_weight": "D[H]", "layer_scalar": "D[1]", "addresses": "int64[N]"}


@op(mutates=("residual",), takes={**_TAKES, "next_weight": "D[H]"})
def exchange_norm(
    residual: Tensor, h: Tensor, post_weight: Tensor, layer_scalar: Tensor | None, next_weight: Tensor, eps: float,
    peers: Peers,
) -> Call[Tensor]:  # fmt: skip
    """add_norm of the sum of all ranks' h: residual is updated in place; returns norm(residual; next_weight).

    residual [T, H] in h's dtype or fp32, the same on all ranks; h [T, H]; weights [H] and layer_scalar [1], or None for
    1, in h's dtype. Returns [T, H] in h's dtype, the same bits on all ranks. Every rank makes the same calls in the
    same order on one stream, of the same T. Raises ProblemError for more rows than a slot of the peers' memory has.
    On the CPU, where no memory is shared, h stands for every rank's.
    """
    out = empty(h, *h.shape)
    asked = _asked(residual, residual, h, None, post_weight, layer_scalar, next_weight, eps, peers, out)
    return Call("exchange_norm", *asked, out)


@op(mutates=("residual",), takes=_TAKES)
def exchange_post_norm(
    residual: Tensor, h: Tensor, post_weight: Tensor, layer_scalar: Tensor | None, eps: float, peers: Peers
) -> Call[None]:
    """As exchange_norm, where no norm follows: residual alone is written."""
    asked = _asked(residual, residual, h, None, post_weight, layer_scalar, None, eps, peers, None)
    return Call("exchange_norm", *asked, None)


@op(takes={**_TAKES, "next_weight": "D[H]"})
def exchange_norm_functional(
    residual: Tensor, h: Tensor, post_weight: Tensor, layer_scalar: Tensor | None, next_weight: Tensor, eps: float,
    peers: Peers,
) -> Call[tuple[Tensor, Tensor]]:  # fmt: skip
    """As exchange_norm, and writes no argument but the peers' memory: returns the new residual, in residual's dtype,
    and its norm. For graphs that others compile, cut apart and rewrite.
    """
    results = empty(residual, *residual.shape), empty(h, *h.shape)
    asked = _asked(results[0], residual, h, None, post_weight, layer_scalar, next_weight, eps, peers, results[1])
    return Call("exchange_norm", *asked, results)


@op(takes=_TAKES)
def exchange_post_norm_functional(
    residual: Tensor, h: Tensor, post_weight: Tensor, layer_scalar: Tensor | None, eps: float, peers: Peers
) -> Call[Tensor]:
    """As exchange_norm_functional, where no norm follows: returns the new residual."""
    out = empty(residual, *residual.shape)
    asked = _asked(out, residual, h, None, post_weight, layer_scalar, None, eps, peers, None)
    return Call("exchange_norm", *asked, out)


@op(
    mutates=("residual",),
    takes={
        **_TAKES, "routed": "D[T, K, H]", "topk_weights": "fp32[T, K]", "h_norm": "D[H]", "routed_norm": "D[H]",
        "next_weight": "D[H]",
    },
)  # fmt: skip
def exchange_pair_norm(
    residual: Tensor, h: Tensor, h_norm: Tensor, experts: Routed, post_weight: Tensor, layer_scalar: Tensor | None,
    next_weight: Tensor, eps: float, peers: Peers,
) -> Call[Tensor]:  # fmt: skip
    """As exchange_norm of norm(sum of h; h_norm) + norm(sum of experts; routed_norm), both summed over the ranks.

    The end of a layer with experts: h is the dense MLP's output, a rank's experts are sum_k topk_weights_k routed_k, in
    fp32 and rounded before they are exchanged. routed [T, K, H] in h's dtype, topk_weights [T, K] fp32, K in 1..8.
    """
    out = empty(h, *h.shape)
    require(experts.routed.shape[1] > 0, f"top_k=0 is not in 1..{MAX_TOP_K}")
    asked = _asked(residual, residual, h, (h_norm, experts), post_weight, layer_scalar, next_weight, eps, peers, out)
    return Call("exchange_norm", *asked, out)


def _asked(
    residual_out: Tensor, residual: Tensor, h: Tensor, pair: tuple[Tensor, Routed] | None, post_weight: Tensor,
    layer_scalar: Tensor | None, next_weight: Tensor | None, eps: float, peers: Peers, out: Tensor | None,
) -> tuple[Problem | None, dict[str, Any]]:  # fmt: skip
    tokens, hidden = residual.shape
    h_norm, experts = (None, None) if pair is None else pair
    routed = None if experts is None else experts.routed
    problem = None
    if tokens:
        problem = Problem(
            peers.addresses.shape[0] - 1, hidden, DTYPE_NAME[h.dtype], DTYPE_NAME[residual.dtype],
            0 if routed is None else routed.shape[1], layer_scalar is not None, next_weight is not None, tokens,
        )  # fmt: skip
        require(tokens * problem.rows <= peers.max_rows,
                f"{tokens} tokens of {problem.rows} rows; the peers' memory has slots of {peers.max_rows}")  # fmt: skip
        require(0 <= peers.rank < problem.ranks, f"rank={peers.rank} is not in 0..{problem.ranks - 1}")
    arguments = {
        "residual_out": residual_out, "out": out, "residual": residual, "h": h, "routed": routed, "h_norm": h_norm,
        "routed_norm": None if experts is None else experts.routed_norm, "post_weight": post_weight,
        "layer_scalar": layer_scalar, "next_weight": next_weight, "addresses": peers.addresses, "eps": eps,
        "rank": peers.rank, "max_rows": peers.max_rows, "two_shot_from": peers.two_shot_from, "num_tokens": tokens,
        "topk_weights": None if experts is None else experts.topk_weights,
    }  # fmt: skip
    return problem, arguments
