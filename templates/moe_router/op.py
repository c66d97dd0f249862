"""Tensors to calls of moe_router."""

from __future__ import annotations

import torch
from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.moe_router.spec import Problem


@op(
    takes={
        "residual": "R[T, H]",
        "router_scale": "D[H]",
        "router": "D[E, H]",
        "per_expert_scale": "D[E]",
        "pre_norm": "D[H]",
    }
)
def moe_router(
    residual: Tensor,
    router_scale: Tensor,
    router: Tensor,
    per_expert_scale: Tensor,
    pre_norm: Tensor,
    top_k: int,
    eps: float,
) -> Call[tuple[Tensor, Tensor, Tensor]]:
    """The model's router on the residual, and the experts' input beside it.

    residual [T, H] in the weights' dtype or fp32; router_scale, pre_norm [H]; router [E, H]; per_expert_scale [E].
    Returns ids [T, top_k] int32 and weights [T, top_k] fp32, as moe_route, and norm(residual; pre_norm) [T, H].
    """
    tokens, hidden = residual.shape
    num_experts = router.shape[0]
    ids = empty(residual, tokens, top_k, dtype=torch.int32)
    weights = empty(residual, tokens, top_k, dtype=torch.float32)
    x = empty(residual, tokens, hidden, dtype=router.dtype)
    problem = None
    if tokens:
        dtype, residual_dtype = DTYPE_NAME[router.dtype], DTYPE_NAME[residual.dtype]
        problem = Problem(hidden, num_experts, top_k, dtype, residual_dtype, tokens)
    arguments = {
        "topk_ids": ids, "topk_weights": weights, "x": x, "residual": residual.contiguous(),
        "router_scale": router_scale, "router": router, "per_expert_scale": per_expert_scale, "pre_norm": pre_norm,
        "eps": eps, "num_tokens": tokens,
    }  # fmt: skip
    return Call("moe_router", problem, arguments, (ids, weights, x))
