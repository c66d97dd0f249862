"""Tensors to calls of moe_route."""

from __future__ import annotations

import torch
from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.moe_route.spec import Problem


@op(takes={"logits": "L[T, E]", "per_expert_scale": "D[E]"})
def moe_route(logits: Tensor, per_expert_scale: Tensor, top_k: int) -> Call[tuple[Tensor, Tensor]]:
    """Softmax over all experts in fp32, the top k of it renormalised to sum 1, then times per_expert_scale.

    logits [T, E]; per_expert_scale [E]. Returns ids [T, top_k] int32 and weights [T, top_k] fp32.
    """
    tokens, num_experts = logits.shape
    ids = empty(logits, tokens, top_k, dtype=torch.int32)
    weights = empty(logits, tokens, top_k, dtype=torch.float32)
    problem = None
    if tokens:
        dtype, logits_dtype = DTYPE_NAME[per_expert_scale.dtype], DTYPE_NAME[logits.dtype]
        problem = Problem(num_experts, top_k, dtype, logits_dtype, tokens)
    arguments = {
        "topk_ids": ids, "topk_weights": weights, "logits": logits, "per_expert_scale": per_expert_scale,
        "num_tokens": tokens,
    }  # fmt: skip
    return Call("moe_route", problem, arguments, (ids, weights))
